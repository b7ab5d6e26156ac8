"""A worker's process: `python -m engine.executor.worker_process FD`, started by `multiprocess.py` and by nobody else.

The main thread executes orders one after the other. A second thread takes them from the channel meanwhile, so that an
engine never waits to hand one over; when the channel ends, the engine is gone, and so is this process, at once and in
the middle of whatever it does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable

import msgspec

from core import logs
from core.errors import ConfigError, EngineError
from core.interpreter import share_lock_often
from engine.executor.channel import Channel
from engine.executor.metadata import find_class
from engine.executor.wire import FromWorker, Problem, ToWorker, WorkerStart, check_made, unpack_step
from engine.executor.worker import Worker

logger = logging.getLogger(__name__)


class WorkerProcess:
    """The loop around a Worker. Main thread."""

    def __init__(self, start: WorkerStart, channel: Channel) -> None:
        self._start = start
        self._channel = channel
        self._encode = msgspec.msgpack.Encoder().encode
        self._worker: Worker | None = None

    def run(self, orders: queue.SimpleQueue[ToWorker]) -> None:
        """Until a shutdown. An order that fails is answered with what went wrong; what to do is the engine's to say."""
        self._answer(self._load)
        while not (order := orders.get()).shutdown:
            self._answer(self._execute, order)
        if self._worker is not None:
            self._worker.close()

    def _answer(self, work: Callable[..., FromWorker], *arguments: ToWorker) -> None:
        try:
            answer = work(*arguments)
        except ConfigError as error:
            answer = FromWorker(problem=Problem(error.name, str(error.value), error.reason))
        except Exception as error:  # whatever it is, the engine waits for an answer
            logger.exception("an order failed")
            first_line = str(error).partition("\n")[0]
            reason = first_line if isinstance(error, EngineError) else f"{type(error).__name__}: {first_line}"
            answer = FromWorker(problem=Problem("", "", reason))
        self._channel.send(self._encode(answer))

    def _load(self) -> FromWorker:
        self._worker = Worker(self._start.spec, self._notify)
        return FromWorker(report=self._worker.load_model())

    def _execute(self, order: ToWorker) -> FromWorker:
        assert self._worker is not None
        if order.sizes is not None:
            handshakes = self._worker.initialize_caches(order.sizes)
            for name in self._start.metadata:
                find_class(name)  # the connectors' modules are imported by now
            return FromWorker(handshakes=handshakes)
        assert order.step is not None
        return FromWorker(made=check_made(self._worker.execute_model(unpack_step(order.step))))

    def _notify(self) -> None:
        with contextlib.suppress(EngineError):  # the engine is gone: the other thread ends the process
            self._channel.send()


def _receive(channel: Channel, orders: queue.SimpleQueue[ToWorker]) -> None:
    decode = msgspec.msgpack.Decoder(ToWorker).decode
    try:
        while (message := channel.receive()) is not None:
            orders.put(decode(message))
    except Exception:  # whatever it is: a worker that hears no orders must not linger
        logger.exception("an order cannot be read")
    os._exit(1)


def main() -> int:
    """Exit code 0 after a shutdown, 1 when the engine is gone."""
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    share_lock_often()
    channel = Channel(socket.socket(fileno=fd))
    orders: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()  # bounded by the engine's steps in flight
    threading.Thread(target=_receive, args=(channel, orders), name="orders", daemon=True).start()
    start = orders.get().start
    assert start is not None
    config = start.spec.config
    logs.setup(config.log_level, f"{config.where}/worker-0", config.log_format)
    WorkerProcess(start, channel).run(orders)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a hanging store must not keep a finished worker alive.
    os._exit(code)
