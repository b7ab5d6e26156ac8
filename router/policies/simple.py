"""Policies that look at nothing, or at the number of calls alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.base import Candidate, Policy
from router.work import Work


class RoundRobin(Policy):
    """Each in turn. The turn goes on from call to call, and counts among those that can be chosen: were it kept over
    all workers, the one behind a worker that is down would get that worker's share besides its own."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        return candidates[self._turn % len(candidates)]

    def assigned(self, work: Work, worker: Candidate) -> None:
        self._turn += 1


class Random(Policy):
    """Any, each as likely."""

    def __init__(self) -> None:
        self._random = random.Random()

    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        return self._random.choice(candidates)


class LeastLoaded(Policy):
    """The one with the fewest calls, other routers' included; among equals, the one that was not used for longest."""

    def __init__(self) -> None:
        self._order = LeastRecent()

    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda worker: (worker.calls + worker.other_calls, self._order.rank(worker)))

    def assigned(self, work: Work, worker: Candidate) -> None:
        self._order.use(worker)

    def left(self, worker: Candidate) -> None:
        self._order.forget(worker)


class LeastRecent:
    """When each worker was used last, to break ties: without it, equal workers would not share idle times' work."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._count = 0

    def rank(self, worker: Candidate) -> int:
        """Smaller for one that was used longer ago; 0 for one that never was."""
        return self._used.get(worker.address, 0)

    def use(self, worker: Candidate) -> None:
        self._count += 1
        self._used[worker.address] = self._count

    def forget(self, worker: Candidate) -> None:
        self._used.pop(worker.address, None)
