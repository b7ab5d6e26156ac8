"""The way to a client: one that takes nothing is not waited for without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protos import router_pb2
from router.watchdog import Wait, Watchdog

Send = Callable[[router_pb2.GenerateResponse], Awaitable[None]]


class Outlet:
    """The way to one client. Used by one task, which is cancelled where the client takes nothing for too long."""

    __slots__ = ("_send", "_wait", "_watchdog", "task")

    def __init__(self, send: Send, watchdog: Watchdog, limit_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._send = send
        self._watchdog = watchdog
        self._wait = watchdog.watch(limit_s, self._give_up)

    @property
    def is_stuck(self) -> bool:
        """Whether the task was cancelled for this."""
        return self._wait.is_overdue

    async def send(self, response: router_pb2.GenerateResponse, now_s: float) -> None:
        """Hand a message over; waits while the client takes none. `now_s`: the event loop's time."""
        self._wait.since_s = now_s
        await self._send(response)
        self._wait.since_s = None

    def close(self) -> None:
        self._watchdog.forget(self._wait)

    def _give_up(self, wait: Wait) -> bool:
        return self.task.cancel()
