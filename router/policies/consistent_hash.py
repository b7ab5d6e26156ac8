"""Encoders: equal images meet at one worker, and no worker gets much more than its share.

Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): a key goes to the first worker on the
ring that has room. Two things are bounded, both counted in predicted embeddings:

- what a worker was given of late, so that the favourites of the day do not all fall to their home: within `_RECENT` of
  the mean. "Of late" is measured in work, not in time: each assignment makes all earlier ones count a little less.
- what a worker has in hand, so that nobody waits while others idle, and the images of one request spread over them.

A worker that was given the same image before is preferred while its bounds allow it: where a key has overflowed once,
it goes on meeting its copy, and does not make another one each time the first worker is a little over or under its
bound. It answers from its cache and not from its queue, so what it has in hand counts less.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.hash_ring import HashRing
from router.policies.base import Candidate, Policy
from router.policies.holders import Holders
from router.work import Work

_RECENT = 1.2
_IN_HAND = 1.25
#: Calls a worker may be above its bound: the bound means nothing before there were many.
_SLACK_CALLS = 8
#: Calls a worker after which an assignment counts a third of what it did.
_WINDOW_CALLS = 400
_MAX_KEYS = 32 * 1024
#: The scale of recent work grows instead of everything else shrinking, and is brought back once it gets here.
_MAX_SCALE = 1e9


class ConsistentHash(Policy):
    """See the head of this file."""

    def __init__(self) -> None:
        self._ring = HashRing()
        self._holders = Holders(_MAX_KEYS)
        self._recent: dict[str, float] = {}  # by address, in units of `_scale`
        self._scale = 1.0
        self._mean_cost = 0.0

    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        by_address = {worker.address: worker for worker in candidates}
        num = len(candidates)
        cost, scaled = work.cost, work.cost * self._scale
        recent = [self._recent.get(address, 0.0) for address in by_address]
        slack = _SLACK_CALLS * max(cost, self._mean_cost) * self._scale
        may_have_had = _RECENT * (sum(recent) + scaled) / num + slack - scaled
        may_have = _IN_HAND * (sum(worker.cost for worker in candidates) + cost) / num
        within = {address for address, had in zip(by_address, recent, strict=True) if had <= may_have_had}

        held_by = self._holders.get(work.key)
        for address in held_by:
            if address in within and by_address[address].cost <= may_have + _SLACK_CALLS * cost:
                return by_address[address]
        for address in self._ring.walk(work.key):
            worker = by_address.get(address)
            if worker is not None and address in within and (not worker.cost or worker.cost + cost <= may_have):
                return worker
        # Big and small images together may leave nobody within both bounds.
        return min(candidates, key=lambda worker: (worker.cost, self._recent.get(worker.address, 0.0)))

    def assigned(self, work: Work, worker: Candidate) -> None:
        self._holders.note(work.key, worker.address)
        self._recent[worker.address] = self._recent.get(worker.address, 0.0) + work.cost * self._scale
        self._mean_cost += (work.cost - self._mean_cost) / _WINDOW_CALLS
        self._scale *= 1 + 1 / (_WINDOW_CALLS * max(1, len(self._ring)))
        if self._scale > _MAX_SCALE:
            self._recent = {address: had / self._scale for address, had in self._recent.items()}
            self._scale = 1.0

    def failed(self, work: Work, worker: Candidate) -> None:
        self._holders.forget(work.key, worker.address)

    def joined(self, worker: Candidate) -> None:
        if worker.address in self._ring:
            self._holders.forget_worker(worker.address)
            return
        # As if it had had its share so far: at zero it would draw everything from the others until it had caught up.
        self._recent[worker.address] = sum(self._recent.values()) / len(self._recent) if self._recent else 0.0
        self._ring.add(worker.address)

    def left(self, worker: Candidate) -> None:
        self._ring.remove(worker.address)
        self._recent.pop(worker.address, None)
        self._holders.forget_worker(worker.address)
