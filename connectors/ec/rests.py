"""Loads that leave processors to a step: beside one that needs them all they rest for longer than they work.

Who loads an item and who sends it are two busy threads more. Where a step has no processors to spare it would be set
aside for them, several milliseconds each time; so the load takes longer, and those who wait for tokens do not notice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: Bytes between two rests: a rest shorter than this takes is mostly the system's own work.
_REST_EVERY_BYTES = 1 << 20
#: To the processor time that the thread has used since the last one.
_REST_RATIO = 2.0
_LONGEST_REST_S = 0.002


class Rests(threading.local):
    """A state for each thread that loads."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._worked_s = time.thread_time()

    def after(self, num_bytes: int, is_crowded: Callable[[], bool]) -> None:
        """So many more bytes are in their place. Returns later where `is_crowded` says so."""
        self._num_bytes += num_bytes
        if self._num_bytes < _REST_EVERY_BYTES:
            return
        self._num_bytes = 0
        if is_crowded():
            time.sleep(min(_REST_RATIO * (time.thread_time() - self._worked_s), _LONGEST_REST_S))
        self._worked_s = time.thread_time()
