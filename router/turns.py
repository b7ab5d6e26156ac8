"""Who begins when: no more than so much predicted work at a time, the rest waits, tenants in fair turns.

Within one priority tenants share by start-time fair queueing (Goyal, Vin and Cheng, 1996): a request is tagged with the
time, counted in work, at which its tenant would be served if all had equal shares, and the smallest tag begins next. A
tenant that has sent a thousand requests does not delay another's first.

Waiting is bounded twice, in requests and in predicted seconds; beyond that a request is refused at once, with the time
after which it is worth trying again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from core.errors import OverloadedError
from core.pace import Pace
from router.metrics import RouterMetrics
from router.shares import Shares

_MAX_IDLE_TENANTS = 1024


class _Waiter:
    __slots__ = ("cost", "future", "left")

    def __init__(self, cost: int, future: asyncio.Future[None]) -> None:
        self.cost = cost
        self.future = future
        self.left = False


class Turns:
    """One event loop. `limit` says how much may be under way now; 0 or less is no limit."""

    def __init__(
        self, limit: Callable[[], float], *, max_queue: int, max_queue_s: float, is_fair: bool, metrics: RouterMetrics
    ) -> None:
        self._limit = limit
        self._max_queue_s = max_queue_s
        self._metrics = metrics
        self._queue = Shares(max_queue, is_fair=is_fair)
        self._heap: list[tuple[int, float, int, _Waiter]] = []  # those that left stay until they are on top
        self._numbers = itertools.count()
        self._virtual_now = 0.0
        self._tags: dict[str, float] = {}  # where each tenant's next request begins, in virtual time
        self._pace: Pace | None = None
        self.work = 0  # under way
        self.num_running = 0
        self._queued_work = 0

    @property
    def num_waiting(self) -> int:
        return self._queue.held

    @asynccontextmanager
    async def turn(self, tenant: str, cost: int, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a turn, and hold it. `cost`: predicted work, at least 1; a smaller `priority` goes first.

        Raises OverloadedError at once where the wait would be too long.
        """
        start_s = asyncio.get_running_loop().time()
        if self._heap or not self._has_room(cost):
            await self._wait(tenant, cost, priority)
        else:
            self._begin(tenant, cost)
        self._metrics.queue_seconds.observe(asyncio.get_running_loop().time() - start_s)
        try:
            yield
        finally:
            self._note_pace(done=cost)
            self.work -= cost
            self.num_running -= 1
            self._let_in()

    def retry_after_s(self, cost: int) -> float:
        """When there may be room for so much more."""
        ahead = self.work + self._queued_work + cost - max(0.0, self._limit())
        return self._note_pace().time_for(max(0.0, ahead))

    def next_end_s(self) -> float:
        """When one of the requests under way may end."""
        return self._note_pace().time_for(self.work / max(1, self.num_running))

    async def _wait(self, tenant: str, cost: int, priority: int) -> None:
        shortage = self._queue.shortage(tenant, 1)
        wait_s = self.retry_after_s(cost)
        if shortage is not None or wait_s > self._max_queue_s:
            self._metrics.reject("queue")
            reason = (
                f"the router's queue is full: {shortage}"
                if shortage is not None
                else f"the router's queue is {wait_s:.0f} s long, the limit is {self._max_queue_s:g}"
            )
            raise OverloadedError(reason, retry_after_s=wait_s)
        waiter = _Waiter(cost, asyncio.get_running_loop().create_future())
        heapq.heappush(self._heap, (priority, self._tag(tenant, cost), next(self._numbers), waiter))
        self._queue.take(tenant, 1)
        self._queued_work += cost
        self._metrics.waiting.set(self.num_waiting)
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                # Let in at the very moment that it was cancelled: the turn goes to the next one.
                self.work -= cost
                self.num_running -= 1
            waiter.left = True
            self._let_in()
            raise
        finally:
            self._queue.give_back(tenant, 1)
            self._queued_work -= cost
            self._metrics.waiting.set(self.num_waiting)

    def _has_room(self, cost: int) -> bool:
        limit = self._limit()
        # One that is larger than the limit runs alone.
        return limit <= 0 or self.work + cost <= limit or not self.num_running

    def _begin(self, tenant: str, cost: int) -> None:
        self._note_pace()
        self._virtual_now = max(self._virtual_now, self._tag(tenant, cost))
        self.work += cost
        self.num_running += 1

    def _let_in(self) -> None:
        while self._heap:
            _, tag, _, waiter = self._heap[0]
            if waiter.left:
                heapq.heappop(self._heap)
            elif self._has_room(waiter.cost):
                heapq.heappop(self._heap)
                self._virtual_now = max(self._virtual_now, tag)
                self._note_pace()
                self.work += waiter.cost
                self.num_running += 1
                waiter.future.set_result(None)
            else:
                break
        if len(self._heap) > 2 * self.num_waiting + 16:
            self._heap = [entry for entry in self._heap if not entry[3].left]
            heapq.heapify(self._heap)

    def _tag(self, tenant: str, cost: int) -> float:
        start = max(self._virtual_now, self._tags.get(tenant, 0.0))
        self._tags[tenant] = start + cost
        if len(self._tags) > _MAX_IDLE_TENANTS:
            self._tags = {name: tag for name, tag in self._tags.items() if tag > self._virtual_now}
        return start

    def _note_pace(self, done: float = 0.0) -> Pace:
        now_s = asyncio.get_running_loop().time()
        if self._pace is None:
            self._pace = Pace(now_s)
        self._pace.note(now_s, was_busy=self.num_running > 0, done=done)
        return self._pace
