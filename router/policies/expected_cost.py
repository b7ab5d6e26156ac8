"""Prefill: the worker where the prompt is done soonest, by what is queued there and what is new to it.

    expected cost = our work under way there + others' work + the part of this prompt that the worker has not seen

The router remembers which worker was given which beginnings of prompts, images included, which is what their prefix
caches hold, more or less. Two prompts share blocks up to where they differ, so a conversation goes on where its KV is,
unless the queue there is longer than computing it anew takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Policy
from router.policies.holders import Holders
from router.policies.simple import LeastRecent
from router.work import Work

_MAX_BLOCKS = 128 * 1024
#: Before any prompt was seen, what a request of another router's is taken to cost.
_FIRST_MEAN = 256.0
_MEAN_OVER = 100


class ExpectedCost(Policy):
    """See the head of this file."""

    def __init__(self) -> None:
        self._holders = Holders(_MAX_BLOCKS)
        self._order = LeastRecent()
        self._mean_cost = _FIRST_MEAN
        self._latest: tuple[Work, dict[str, int]] | None = None  # what `_cached` found last, until something changes

    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        cached = self._cached(work)
        return min(candidates, key=lambda worker: (self._cost(work, worker, cached), self._order.rank(worker)))

    def charge(self, work: Work, worker: Candidate) -> float:
        return max(1, work.cost - self._cached(work).get(worker.address, 0))

    def assigned(self, work: Work, worker: Candidate) -> None:
        self._latest = None
        self._order.use(worker)
        self._mean_cost += (work.cost - self._mean_cost) / _MEAN_OVER
        # The last block first: it is then forgotten first, before the beginnings that other prompts share.
        for block in reversed(work.prefix):
            self._holders.note(block.digest, worker.address)

    def failed(self, work: Work, worker: Candidate) -> None:
        self._latest = None
        for block in work.prefix:
            self._holders.forget(block.digest, worker.address)

    def joined(self, worker: Candidate) -> None:
        self._latest = None
        self._holders.forget_worker(worker.address)

    def left(self, worker: Candidate) -> None:
        self._latest = None
        self._holders.forget_worker(worker.address)
        self._order.forget(worker)

    def _cost(self, work: Work, worker: Candidate, cached: dict[str, int]) -> float:
        queued = worker.cost + worker.other_calls * self._mean_cost
        shortage = 0
        if worker.kv_capacity:
            # Blocks that finished prompts lease are not free before decode has pulled them.
            shortage = max(0, worker.other_kv_tokens + worker.kv_tokens + work.cost - worker.kv_capacity)
        return queued + shortage + work.cost - cached.get(worker.address, 0)

    def _cached(self, work: Work) -> dict[str, int]:
        """Tokens of the prompt's beginning that each worker is thought to hold, by address."""
        if self._latest is not None and self._latest[0] is work:
            return self._latest[1]
        held: dict[str, int] = {}
        self._latest = (work, held)
        so_far = 0
        for block in work.prefix:
            holders = self._holders.get(block.digest)
            if not holders:
                break
            for address in holders:
                # Only where it has all that comes before: a gap ends what a prefix cache can use.
                if held.get(address, 0) == so_far:
                    held[address] = so_far + block.num_tokens
            so_far += block.num_tokens
        return held
