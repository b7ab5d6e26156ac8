"""Decode: the worker whose KV cache is the emptiest once the request has grown to its end, and whose queue is short."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import Candidate, Policy
from router.policies.simple import LeastRecent
from router.work import Work

#: Taken for the capacity of a worker that never said: only the order among such workers matters.
_UNKNOWN_CAPACITY = 1 << 20
#: A request that waits weighs as much as a tenth of the cache: something there is full already.
_WAITING = 0.1
#: And one that runs slows each step down a little, however short it is.
_RUNNING = 0.01
#: What would have to be preempted weighs ten times: it is computed again.
_OVER = 10.0


class FreeKv(Policy):
    """The smallest of: share of the cache in use + waiting and running requests. Other routers' are in the report."""

    def __init__(self) -> None:
        self._order = LeastRecent()

    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda worker: (_pressure(work, worker), self._order.rank(worker)))

    def assigned(self, work: Work, worker: Candidate) -> None:
        self._order.use(worker)

    def left(self, worker: Candidate) -> None:
        self._order.forget(worker)


def _pressure(work: Work, worker: Candidate) -> float:
    used = worker.other_kv_tokens + worker.kv_tokens + work.kv_tokens
    share = used / (worker.kv_capacity or _UNKNOWN_CAPACITY)
    over = max(0.0, share - 1.0)
    return share + _OVER * over + _WAITING * worker.waiting + _RUNNING * (worker.calls + worker.other_calls)
