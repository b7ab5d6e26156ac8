"""The engine's process: `python -m engine.core_process`, started by `engine/client.py` and by nobody else.

It reads one line of JSON from its standard input, connects two ZMQ sockets, and steps while there is work. Scheduling,
messages and outputs are on the main thread, which never waits for a step where the executor runs it elsewhere. When
standard input closes, the parent is gone, and so is this process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from core import logs
from core.errors import ConfigError, EngineError
from core.interpreter import share_lock_often
from engine.core import EngineCore
from engine.protocol import EngineCoreOutputs
from engine.wire import ENGINE_IDENTITY, EngineStart, Fatal, InMessage, OutMessage, Ready

logger = logging.getLogger(__name__)

#: Steps that end nothing still tell the state this often.
_STATS_EVERY_S = 0.1


class _Wakeup:
    """Lets any thread end the main thread's poll."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake already; closed: the process ends
            self._write.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass


class CoreProcess:
    """The loop around an EngineCore."""

    def __init__(self, start: EngineStart, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._wakeup = _Wakeup()
        self._input = context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, ENGINE_IDENTITY)
        self._input.connect(start.input_address)
        self._output = context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)  # bounded by the number of requests, which is
        self._output.connect(start.output_address)
        self._poller = zmq.Poller()
        self._poller.register(self._input, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(InMessage).decode
        self._core = EngineCore(start.config, self._wakeup.set)
        # Clients reach the engine's DEALER only after it has spoken first: the ROUTER learns its identity from this.
        self._input.send(b"ready")
        self.send(OutMessage(ready=Ready(self._core.info)))

    def send(self, message: OutMessage) -> None:
        self._output.send(self._encode(message), copy=False)

    def run(self) -> None:
        """Until a shutdown message."""
        core = self._core
        try:
            sent_s = 0.0
            while self._take_input():
                outputs = core.step()
                now_s = time.monotonic()
                if outputs or core.is_settled or now_s - sent_s >= _STATS_EVERY_S:
                    sent_s = now_s
                    made = EngineCoreOutputs(outputs=outputs, stats=core.scheduler.make_stats())
                    self.send(OutMessage(outputs=made))
        except Exception as error:  # whatever it is, those that wait for tokens are told
            logger.exception("the engine died")
            reason = str(error) if isinstance(error, EngineError) else f"{type(error).__name__} in the engine's step"
            self.send(OutMessage(outputs=EngineCoreOutputs(fatal=reason)))
            raise
        finally:
            core.close()

    def _take_input(self) -> bool:
        """Take every message that is there; wait for one while there is nothing to do. False: shut down."""
        core = self._core
        while True:
            wait_s = core.wait_s()
            ready = dict(self._poller.poll(None if wait_s is None else math.ceil(wait_s * 1000)))
            self._wakeup.clear()
            told = self._input in ready
            if told:
                while True:
                    try:
                        message = self._decode(self._input.recv(zmq.NOBLOCK))
                    except zmq.Again:
                        break
                    if message.shutdown:
                        return False
                    if message.add is not None:
                        core.add_request(message.add)
                    for request_id in message.abort:
                        core.abort(request_id)
                    for request_id in message.release:
                        core.release(request_id)
            core.check_health()
            if told or core.wait_s() == 0.0:
                return True


def _die_with_parent(address: str) -> None:
    """The parent holds the other end of standard input for as long as it lives. Where it was killed, nobody else
    removes the folder that the sockets are in."""

    def watch() -> None:
        sys.stdin.buffer.read()
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main() -> int:
    """Exit code 0 after a shutdown, 2 for a wrong option or file, 1 for everything else."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)
    _die_with_parent(start.input_address)
    share_lock_often()
    logs.setup(start.config.log_level, start.config.where, start.config.log_format)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        process = CoreProcess(start, context)
    except ConfigError as error:
        _report(context, start, Fatal("config", error.name, str(error.value), error.reason))
        return 2
    except Exception as error:  # whatever it is, who started us waits for a word
        logger.exception("the engine did not start")
        _report(context, start, Fatal("engine", "", "", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
        return 1
    try:
        process.run()
    except Exception:  # `run` has logged and reported it
        return 1
    finally:
        context.destroy(linger=1000)
    return 0


def _report(context: zmq.Context[zmq.Socket[bytes]], start: EngineStart, fatal: Fatal) -> None:
    output = context.socket(zmq.PUSH)
    output.connect(start.output_address)
    output.send(msgspec.msgpack.encode(OutMessage(failed=fatal)))
    context.destroy(linger=1000)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a hanging store must not keep a finished engine alive.
    os._exit(code)
