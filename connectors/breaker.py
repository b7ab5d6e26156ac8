"""A circuit breaker: a part that keeps failing is left alone for a while, so that nobody waits for it.

    CLOSED ──`failures` in a row──▶ OPEN ──after `cooldown_s`──▶ one trial: success ▶ CLOSED, failure ▶ OPEN again

The pattern is Nygard's (Release It!, 2007).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Any thread. Every `allow()` that answered True is followed by one `succeeded()` or `failed()`."""

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_failures = failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._retry_at_s: float | None = None  # None: closed
        self._num_opens = 0

    @property
    def is_open(self) -> bool:
        """Whether callers are turned away now. Takes no trial."""
        with self._lock:
            return self._retry_at_s is not None and self._clock() < self._retry_at_s

    def allow(self) -> bool:
        """Whether to try. While open: True for one caller each `cooldown_s`, whose outcome decides."""
        with self._lock:
            if self._retry_at_s is None:
                return True
            now_s = self._clock()
            if now_s < self._retry_at_s:
                return False
            self._retry_at_s = now_s + self._cooldown_s  # a trial that never reports back must not block for ever
            return True

    def succeeded(self) -> None:
        """The part answered; what it said does not matter."""
        with self._lock:
            self._num_failures = 0
            self._retry_at_s = None

    def failed(self) -> None:
        """The part failed to answer."""
        with self._lock:
            self._num_failures += 1
            was_closed = self._retry_at_s is None
            if self._num_failures >= self._max_failures:
                self._retry_at_s = self._clock() + self._cooldown_s
                self._num_opens += was_closed

    def take_opens(self) -> int:
        """How often it opened since the last call."""
        with self._lock:
            opens, self._num_opens = self._num_opens, 0
        return opens
