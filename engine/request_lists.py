"""Where each request of an engine stands, and who goes before whom.

    waiting    hold nothing: had no turn yet, or were preempted
    parked     had their turn, and lack an item or remote blocks
    resuming   have what they were parked for; they go before all that wait
    running

A request stands in exactly one of them. Everything is taken along one order, the rank: level, then turn.
"""

from __future__ import annotations

import time
from bisect import insort

from engine.request import Request, RequestStatus
from engine.request_queue import RequestQueue
from engine.settings import SchedulerSettings

_PARKED = (RequestStatus.WAITING_FOR_ENCODER_CACHE, RequestStatus.WAITING_FOR_REMOTE_KVS)


def _rank(request: Request) -> tuple[int, tuple[float, int]]:
    """Who runs before whom, and keeps its blocks longer."""
    assert request.queue_tag is not None
    return request.level, request.queue_tag


class RequestLists:
    """Part of the scheduler. Step thread only. The lists are to be read; what changes them is below."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.waiting = RequestQueue(settings.aging_s)
        self.parked: dict[str, Request] = {}
        self.resuming: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self.in_runner: set[str] = set()  # ids of those whose state the runner holds
        self._num_rows = settings.max_num_seqs
        self._aging_s = settings.aging_s
        self._dropped: list[str] = []  # what the runner must be told to forget

    @property
    def num_waiting(self) -> int:
        """All that do not run."""
        return len(self.waiting) + len(self.parked) + len(self.resuming)

    @property
    def has_row(self) -> bool:
        """Whether the runner can hold the state of one more."""
        return len(self.in_runner) < self._num_rows

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def wait(self, request: Request) -> None:
        """A new request, or one that holds nothing any more."""
        self.waiting.push(request, time.monotonic())

    def park(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        request.parked_s = time.time()
        self.parked[request.request_id] = request

    def resume(self, request: Request) -> None:
        """A parked one has what it lacked."""
        del self.parked[request.request_id]
        request.status = RequestStatus.WAITING
        insort(self.resuming, request, key=_rank)

    def run(self, request: Request) -> None:
        """One that waited or resumed has its turn."""
        self.remove(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take a request out of whichever list it is in."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status in _PARKED:
            del self.parked[request.request_id]
        elif request in self.resuming:
            self.resuming.remove(request)
        else:
            self.waiting.remove(request)

    def drop_from_runner(self, request: Request) -> None:
        """The runner need not hold its state any more."""
        if request.request_id in self.in_runner:
            self.in_runner.discard(request.request_id)
            self._dropped.append(request.request_id)

    def take_dropped(self) -> list[str]:
        """Since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def next_waiting(self) -> Request | None:
        """Whose turn it is. One that the runner knows goes first while the runner has no row for another: rows come
        free when requests go on. Where it cannot, the first that resumes takes a row from it, or from another."""
        if not self.resuming:
            return self.waiting.peek(time.monotonic())
        if not self.has_row:
            for request in self.resuming:
                if request.request_id in self.in_runner:
                    return request
        return self.resuming[0]

    def parked_for_items(self) -> list[Request]:
        """By rank. One that is here for long moves up as those that wait do: room is given by rank too."""
        lacking = [r for r in self.parked.values() if r.status is RequestStatus.WAITING_FOR_ENCODER_CACHE]
        if lacking:
            best = min(r.level for r in (*lacking, *self.resuming[:1], *self.running[:1]))
            now_s = time.monotonic()
            for request in lacking:
                if request.level > best and now_s - request.aged_s >= self._aging_s:
                    request.level, request.aged_s = request.level - 1, now_s
        return sorted(lacking, key=_rank)

    def idle(self) -> list[Request]:
        """The parked and resuming requests, the last in rank first; not those that are pulling, whose blocks are being
        written to."""
        idle = [r for r in self.parked.values() if r.status is not RequestStatus.WAITING_FOR_REMOTE_KVS]
        return sorted((*idle, *self.resuming), key=_rank, reverse=True)

    def idle_after(self, request: Request) -> list[Request]:
        """Those that rank after this one."""
        rank = _rank(request)
        return [other for other in self.idle() if _rank(other) > rank]
