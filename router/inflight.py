"""Equal work under way is done once, and only for as long as somebody waits for it.

Each piece of work is a task of its own that belongs to none of its waiters: the first may be cancelled while the second
still wants the result. The last waiter that leaves early cancels the task. Results are not kept: once a task has ended,
the next caller starts another (the encoder cache is what remembers).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from core.errors import DeadlineExceededError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Entry(Generic[V]):
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.waiters = 0


class Inflight(Generic[K, V]):
    """Shared tasks by key. One event loop; holds nothing while nobody waits."""

    def __init__(self) -> None:
        self._entries: dict[K, _Entry[V]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    async def get(self, key: K, start: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The result of the task for `key`, begun with `start()` unless it is under way already.

        Raises what the task raises. The task runs under the deadline of the caller that began it; where only that
        one has passed, another caller begins anew.
        """
        while True:
            entry = self._entries.get(key)
            mine = entry is None
            if entry is None:
                entry = _Entry(asyncio.create_task(start()))
                self._entries[key] = entry
                entry.task.add_done_callback(functools.partial(self._forget, key))
            entry.waiters += 1
            try:
                return await asyncio.shield(entry.task)
            except DeadlineExceededError:
                if mine:
                    raise
            finally:
                entry.waiters -= 1
                if not entry.waiters and not entry.task.done():
                    self._forget(key, entry.task)
                    entry.task.cancel()

    def _forget(self, key: K, task: asyncio.Task[V]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.task is task:
            del self._entries[key]
        if task.done() and not task.cancelled():
            task.exception()  # seen, even where every waiter has left
