"""How often the router tries again, and how long it waits before.

A worker that dies takes many requests with it at once, and every one of them is to go on elsewhere: so each request may
make up for one loss of its own without asking. What goes beyond that, and every retry that adds load where nothing was
lost (a worker that is full, slow or wrong), is paid from a budget that all requests share and that fills by time and by
the requests that come: under overload, retries stay a small part of the work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

#: Failed attempts of one request, over all stages, of which the next one ends it. A request that itself is what kills
#: workers must not meet all of them.
MAX_FAILURES = 8
#: As above, of answers that make no sense and faults inside a worker: the request may be their reason.
MAX_BROKEN = 2

_CAPACITY = 100.0
_PER_SECOND = 10.0
_PER_REQUEST = 0.2
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0


class RetryBudget:
    """A token bucket that the requests of one router share. Event loop only. `clock` answers seconds that only grow."""

    __slots__ = ("_at_s", "_clock", "_tokens")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = _CAPACITY
        self._at_s = clock()

    def earn(self) -> None:
        """A request was accepted."""
        self._tokens = min(_CAPACITY, self._tokens + _PER_REQUEST)

    def has_one(self) -> bool:
        """Whether one retry can be paid."""
        now_s = self._clock()
        self._tokens = min(_CAPACITY, self._tokens + (now_s - self._at_s) * _PER_SECOND)
        self._at_s = now_s
        return self._tokens >= 1.0

    def spend(self) -> bool:
        """Pay for one retry. False where too little is left: what failed then stays failed."""
        if not self.has_one():
            return False
        self._tokens -= 1.0
        return True


class Allowance:
    """What one request may still try. Event loop only."""

    __slots__ = ("_budget", "_is_first_free", "_num_broken", "_num_failures")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._is_first_free = True
        self._num_broken = 0
        self._num_failures = 0
        budget.earn()

    @property
    def may_retry(self) -> bool:
        """Whether `take` would answer yes to a failure that the worker outlived."""
        return self._num_failures + 1 < MAX_FAILURES and self._budget.has_one()

    def take(self, *, was_lost: bool, is_broken: bool) -> bool:
        """Note a failed attempt; whether there may be another one.

        `was_lost`: its worker has gone. `is_broken`: it answered nonsense, or failed by itself.
        """
        self._num_failures += 1
        self._num_broken += is_broken
        if self._num_failures >= MAX_FAILURES or self._num_broken >= MAX_BROKEN:
            return False
        if was_lost and self._is_first_free:
            self._is_first_free = False
            return True
        return self._budget.spend()


def backoff_s(num_failures: int) -> float:
    """Seconds to wait before going elsewhere. The first time none; then up to twice as long each time, drawn evenly
    from nothing to that ("full jitter"), so that what failed together does not come back together."""
    if num_failures <= 1:
        return 0.0
    return random.uniform(0.0, min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0**num_failures))
