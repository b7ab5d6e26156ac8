"""A worker's circuit breaker: after failures it is left alone for a moment, then one call at a time tries it.

    closed ──one connection that failed, or _SOFT_FAILURES others in a row──> open
      ^                                                                        │ after a pause that doubles, with jitter
      └──── the probe succeeds ──── half-open <────────────────────────────────┘
                                        └── the probe fails ──> open

Times are seconds on the event loop's clock, given by the caller.
"""

from __future__ import annotations

import random

_SOFT_FAILURES = 3
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 15.0
_JITTER = 0.25


class Breaker:
    """Slotted state of one worker's. Event loop only."""

    __slots__ = ("_failures", "_open_until_s", "_pause_s", "_probing")

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._open_until_s: float | None = None  # None: closed
        self._pause_s = _FIRST_PAUSE_S  # of the next time that it opens
        self._probing = False

    @property
    def closed(self) -> bool:
        return self._open_until_s is None

    def allows(self, now_s: float) -> bool:
        """Whether a call may go to the worker. Changes nothing."""
        return self._open_until_s is None or (now_s >= self._open_until_s and not self._probing)

    def begin(self) -> bool:
        """A call begins. True where it is a probe: then the caller says so at its end."""
        if self._open_until_s is None or self._probing:
            return False
        self._probing = True
        return True

    def succeed(self) -> None:
        """The worker answered well, to a probe or to anything else."""
        self._failures = 0
        self._open_until_s = None
        self._pause_s = _FIRST_PAUSE_S

    def fail(self, now_s: float, *, hard: bool) -> bool:
        """A call failed; `hard`: the worker could not even be reached. True where the breaker opened by it."""
        self._failures += 1
        was_closed = self.closed
        if was_closed and not hard and self._failures < _SOFT_FAILURES:
            return False
        # Calls that were under way together fail together: that is one failure, and one pause.
        if was_closed or now_s >= (self._open_until_s or 0.0):
            self._open_until_s = now_s + self._pause_s * random.uniform(1 - _JITTER, 1 + _JITTER)
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        return was_closed

    def end_probe(self) -> None:
        """The probe is over, whatever came of it; without a word in between, the next call is one."""
        self._probing = False
