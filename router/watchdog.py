"""Waits that have lasted too long, found by one timer for all of them.

A timer for each wait would cost more than the waits: tens of them begin and end with every request. So each is an entry
in a set, with the time since when it lasts, and whatever is in the set is looked at four times a second. While the set
is empty nothing runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: How late a wait may be found.
_PERIOD_S = 0.25


class Wait:
    """One wait. Its owner sets `since_s` to the loop's time when it begins to wait, and to None when it does not."""

    __slots__ = ("is_overdue", "limit_s", "on_overdue", "since_s")

    def __init__(self, since_s: float | None, limit_s: float, on_overdue: Callable[[Wait], bool]) -> None:
        self.since_s = since_s
        self.limit_s = limit_s
        self.on_overdue = on_overdue
        self.is_overdue = False


class Watchdog:
    """All waits of a router. Event loop only."""

    def __init__(self) -> None:
        self._waits: set[Wait] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waits)

    def watch(self, limit_s: float, on_overdue: Callable[[Wait], bool], *, since_s: float | None = None) -> Wait:
        """Watch a wait until `forget`. Once it has lasted `limit_s` seconds, `on_overdue` is called on the event loop;
        where it answers False, nothing is done about it yet, and it is asked again."""
        wait = Wait(since_s, limit_s, on_overdue)
        self._waits.add(wait)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._look)
        return wait

    def forget(self, wait: Wait) -> None:
        """The wait is over. Without effect where it is not watched."""
        self._waits.discard(wait)

    def close(self) -> None:
        """Look no more."""
        self._waits.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_PERIOD_S, self._look) if self._waits else None
        now_s = loop.time()
        for wait in tuple(self._waits):
            since_s = wait.since_s
            if since_s is None or wait.is_overdue or now_s - since_s < wait.limit_s:
                continue
            wait.is_overdue = wait.on_overdue(wait)
