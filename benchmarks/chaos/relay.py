"""A TCP relay between the router and one worker, whose network can be taken away bit by bit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_HOST = "127.0.0.1"
_CHUNK = 64 * 1024
_TIMEOUT_S = 10.0


class Loop:
    """An event loop on a thread of its own, for the relays of one cluster. Close it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, from any other thread."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(_TIMEOUT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TIMEOUT_S)
        self._loop.close()


class Relay:
    """Listens on a port of its own and passes bytes on to `target`, HOST:PORT. Its methods run on any thread but the
    loop's; the underscored ones on the loop."""

    def __init__(self, loop: Loop, target: str) -> None:
        self._loop = loop
        self._target = target.rsplit(":", 1)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._pause_s = 0.0
        self.port = 0
        loop.run(self._open())

    @property
    def address(self) -> str:
        return f"{_HOST}:{self.port}"

    def close_port(self) -> None:
        """Connections break, new ones are refused."""
        self._loop.run(self._close())

    def cut(self) -> None:
        """Connections break, new ones are taken."""
        self._loop.run(self._cut())

    def stall(self) -> None:
        """Connections stand, and nothing passes."""
        self._loop.run(self._set(flows=False, pause_s=0.0))

    def slow(self, pause_s: float) -> None:
        """Every piece that passes waits so long first."""
        self._loop.run(self._set(flows=True, pause_s=pause_s))

    def heal(self) -> None:
        """As it was."""
        self._loop.run(self._open())

    async def _set(self, *, flows: bool, pause_s: float) -> None:
        self._pause_s = pause_s
        if flows:
            self._flows.set()
        else:
            self._flows.clear()

    async def _open(self) -> None:
        await self._set(flows=True, pause_s=0.0)
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, _HOST, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut()

    async def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection(self._target[0], int(self._target[1]))
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._pass(reader, back))
                        group.create_task(self._pass(there, writer))
                finally:
                    back.transport.abort()
        except* (OSError, _EndedError, asyncio.CancelledError):
            pass  # cancelled: by `_cut`, whose victim this is
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            await self._flows.wait()
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            writer.write(data)
            await writer.drain()
        raise _EndedError  # gRPC has no use for half a connection


class _EndedError(Exception):
    pass
