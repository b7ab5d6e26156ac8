"""Waiting requests, in the order in which they are to run: priority, then fairness between tenants, then arrival.

Within one priority tenants share by start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", 1996): a
request is tagged with the time, counted in tokens of service, at which its tenant would be served if all tenants had
equal shares; the smallest tag runs next. A tenant alone is served in the order of arrival. One that has sent a thousand
requests does not delay another's first, and is owed nothing for the time in which it sent none.

A request that has waited `aging_s` moves up by one priority, so that none starves.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator

from engine.request import Request

#: Tags of tenants without waiting requests are kept up to so many, then those that have become meaningless are dropped.
_MAX_IDLE_TENANTS = 1024
#: Output tokens that a request is charged for at most when it arrives: how many it will make is not known.
_MAX_CHARGED_OUTPUT = 256


class _Level:
    """The requests of one priority."""

    __slots__ = ("by_age", "by_tag")

    def __init__(self) -> None:
        self.by_tag: list[
            tuple[float, int, int, Request]
        ] = []  # a heap; entries of requests that left it stay until on top
        self.by_age: OrderedDict[Request, None] = OrderedDict()  # those that are really there, longest wait first


class RequestQueue:
    """Step thread only. Every operation is at most logarithmic in the number of requests."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._levels: dict[int, _Level] = {}
        self._numbers = itertools.count()
        self._virtual_now = 0.0
        self._tenant_tags: dict[str, float] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._levels):
            yield from self._levels[priority].by_age

    def push(self, request: Request, now_s: float) -> None:
        """Add a new request, or one that was preempted: that one keeps its place."""
        if request.queue_tag is None:
            start = max(self._virtual_now, self._tenant_tags.get(request.tenant, 0.0))
            request.queue_tag = (start, next(self._numbers))
            request.level = request.priority
            self._tenant_tags[request.tenant] = start + self._cost(request)
            if len(self._tenant_tags) > _MAX_IDLE_TENANTS:
                self._drop_idle_tenants()
        request.aged_s = now_s
        self._insert(request, oldest=request.scheduled_s > 0)
        self._length += 1

    def peek(self, now_s: float) -> Request | None:
        """Whose turn it is; None where nobody waits."""
        if not self._length:
            return None
        priorities = sorted(self._levels)
        for better, worse in itertools.pairwise(priorities):
            self._age(worse, better, now_s)
        for priority in priorities:
            level = self._levels[priority]
            if not level.by_age:
                del self._levels[priority]
                continue
            while True:
                request = level.by_tag[0][3]
                if request in level.by_age:
                    return request
                heapq.heappop(level.by_tag)
        return None

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it stands: it runs now, or has ended. Raises KeyError."""
        level = self._levels[request.level]
        del level.by_age[request]
        self._length -= 1
        assert request.queue_tag is not None
        if level.by_tag[0][3] is request:
            heapq.heappop(level.by_tag)
            self._virtual_now = max(self._virtual_now, request.queue_tag[0])
        elif len(level.by_tag) > 2 * len(level.by_age) + 16:  # more that left than that are there
            level.by_tag = [entry for entry in level.by_tag if entry[3] in level.by_age]
            heapq.heapify(level.by_tag)
        if not self._length:
            self._tenant_tags.clear()  # nobody waits: all begin anew as equals

    def _insert(self, request: Request, *, oldest: bool) -> None:
        assert request.queue_tag is not None
        level = self._levels.get(request.level)
        if level is None:
            level = self._levels[request.level] = _Level()
        heapq.heappush(level.by_tag, (*request.queue_tag, next(self._numbers), request))
        level.by_age[request] = None
        if oldest:
            level.by_age.move_to_end(request, last=False)

    def _age(self, worse: int, better: int, now_s: float) -> None:
        by_age = self._levels[worse].by_age
        while by_age:
            request = next(iter(by_age))
            if now_s - request.aged_s < self._aging_s:
                return
            del by_age[request]
            request.level = better
            request.aged_s = now_s
            self._insert(request, oldest=False)

    @staticmethod
    def _cost(request: Request) -> float:
        output = 1 if request.hand_over else min(request.max_total_tokens - request.num_tokens, _MAX_CHARGED_OUTPUT)
        return float(request.num_prompt_tokens + output)

    def _drop_idle_tenants(self) -> None:
        self._tenant_tags = {tenant: tag for tenant, tag in self._tenant_tags.items() if tag > self._virtual_now}
