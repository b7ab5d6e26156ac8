"""EngineCoreClient: how a process talks to an engine that lives in another one.

`AsyncMPClient` starts `engine.core_process` and speaks msgpack over two ZMQ sockets in a private folder: ROUTER in,
PULL out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.errors import ConfigError, EngineError
from engine.protocol import EngineCoreOutputs, EngineCoreRequest, EngineInfo
from engine.wire import ENGINE_IDENTITY, EngineStart, Fatal, InMessage, OutMessage

#: A start reads and digests all weights; a large checkpoint on a slow disk takes minutes.
START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 10.0
#: How long the last words of a process that ended by itself may take to come out of the socket. One that was killed has
#: said nothing.
_LAST_WORDS_S = 2.0
_KILLED_S = 0.2
#: OpenMP threads spin between two parallel regions. As long as the default says, they take the cores from other stages
#: on the same machine. Measured over four processes on two cores (benchmarks/serving.py, one request and eight at once,
#: tokens/s): 20000 turns 32 and 47, 1000 turns 30 and 66, 200 turns 28 and 66. The environment may say otherwise.
_SPIN_COUNT = "1000"
T = TypeVar("T")
_ROOT = Path(__file__).resolve().parent.parent


class AsyncMPClient:
    """One engine process. Every method on the event loop that started it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._folder = tempfile.mkdtemp(prefix="triptych-")  # mode 0700: nobody else can speak to the engine
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.ROUTER)
        self._input.setsockopt(zmq.LINGER, 0)
        self._input.setsockopt(zmq.SNDHWM, 0)  # the front process bounds its requests
        self._input.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._output = self._context.socket(zmq.PULL)
        self._output.setsockopt(zmq.LINGER, 0)
        self._output.setsockopt(zmq.RCVHWM, 0)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(OutMessage).decode
        self._process: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Task[int] | None = None

    async def start(self) -> EngineInfo:
        """Start the process and wait until it serves. Raises ConfigError or EngineError; everything is freed then."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await self._start()
        except TimeoutError:
            await self.close()
            raise EngineError(f"the engine did not start within {START_TIMEOUT_S:g} s") from None
        except (OSError, zmq.ZMQError) as error:
            await self.close()
            raise EngineError(f"the engine's process cannot be started: {error.strerror}") from None
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> EngineInfo:
        addresses = [f"ipc://{self._folder}/{name}" for name in ("in", "out")]
        self._input.bind(addresses[0])
        self._output.bind(addresses[1])
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine.core_process",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for us: we drain, then stop the engine
            env={"GOMP_SPINCOUNT": _SPIN_COUNT, **os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(EngineStart(self._config, *addresses)) + b"\n")
        self._exit = asyncio.create_task(self._process.wait())
        message = self._decode(await self._until_dead(self._output.recv()))
        if message.failed is not None:
            raise _start_error(message.failed)
        assert message.ready is not None
        await self._until_dead(self._input.recv_multipart())
        return message.ready.info

    async def add(self, request: EngineCoreRequest) -> None:
        """As `abort` and `release`: raises EngineError once the process is gone."""
        await self._send(InMessage(add=request))

    async def abort(self, request_ids: list[str]) -> None:
        await self._send(InMessage(abort=request_ids))

    async def release(self, request_ids: list[str]) -> None:
        await self._send(InMessage(release=request_ids))

    async def receive(self) -> EngineCoreOutputs:
        """The next step's outputs. Raises EngineError once the process is gone."""
        message = self._decode(await self._until_dead(self._output.recv()))
        assert message.outputs is not None
        if message.outputs.fatal:
            raise EngineError(message.outputs.fatal)
        return message.outputs

    async def close(self) -> None:
        """Stop the process, gently at first. Idempotent."""
        if self._process is not None and self._exit is not None and not self._exit.done():
            try:
                await self._send(InMessage(shutdown=True))
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await asyncio.shield(self._exit)
            except (EngineError, TimeoutError):  # it is still starting, and listens to nobody; or it hangs
                # Not `Process.kill`: where the engine has just ended by itself that takes its exit code away from the
                # watcher, which then warns of an unknown child.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGKILL)
                await self._exit
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, message: InMessage) -> None:
        try:
            await self._input.send_multipart([ENGINE_IDENTITY, self._encode(message)], copy=False)
        except zmq.ZMQError as error:
            raise EngineError(f"the engine cannot be reached: {error.strerror}") from None

    async def _until_dead(self, receiving: Awaitable[T]) -> T:
        receive = asyncio.ensure_future(receiving)
        assert self._exit is not None
        try:
            await asyncio.wait({receive, self._exit}, return_when=asyncio.FIRST_COMPLETED)
            if not receive.done():
                # What it said last may still be on its way: the socket outlives the process.
                await asyncio.wait({receive}, timeout=_KILLED_S if self._exit.result() < 0 else _LAST_WORDS_S)
            if not receive.done():
                raise EngineError(f"the engine's process ended with code {self._exit.result()}")
            return receive.result()
        finally:
            receive.cancel()


def _start_error(failed: Fatal) -> Exception:
    if failed.kind == "config":
        return ConfigError(failed.name, failed.value, failed.reason)
    return EngineError(f"the engine did not start: {failed.reason}")
