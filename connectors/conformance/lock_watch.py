"""How long threads keep Python's interpreter lock, seen by one that wants it some thousand times a second.

While a thread holds the lock, an engine's step thread stands still, whichever of the two is more important. Most of
what moves bytes lets go of it (sockets, files, copies of tensors and arrays, checksums of large pieces); what does not
(slices of a memoryview, `bytes` of a large buffer, freeing memory that goes back to the system, an extension that never
thought of it) is seen here as a thread that wakes up late.

A machine with other work to do wakes threads late too. The kernel says how long a thread waited for a processor
(`schedstat`), and that is taken off; but who holds the lock may have to wait for one as well, so a single long hold
proves nothing. One that comes again each time the same thing is done does: take the least of several rounds.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

_PERIOD_S = 0.0002
_JOIN_S = 10.0
_MAX_STAT_BYTES = 128


class LockWatch:
    """Watches from `with` to its end, on a thread of its own. `longest_s`: for how long it stood still at most, beyond
    the time that it had meant to sleep and the time that it waited for a processor."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._stopping = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lock-watch", daemon=True)

    def __enter__(self) -> LockWatch:
        self._thread.start()
        self._started.wait(_JOIN_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            stat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:  # not Linux, or not told: then it is counted as held
            stat = -1
        try:
            self._watch(stat)
        finally:
            if stat >= 0:
                os.close(stat)

    def _watch(self, stat: int) -> None:
        last_s, last_waited_s = time.perf_counter(), _waited_s(stat)
        self._started.set()
        while not self._stopping:
            time.sleep(_PERIOD_S)
            now_s, waited_s = time.perf_counter(), _waited_s(stat)
            held_s = now_s - last_s - _PERIOD_S - (waited_s - last_waited_s)
            self.longest_s = max(self.longest_s, held_s)
            last_s, last_waited_s = now_s, waited_s


def _waited_s(stat: int) -> float:
    """How long this thread has been ready to run without running."""
    if stat < 0:
        return 0.0
    return int(os.pread(stat, _MAX_STAT_BYTES, 0).split()[1]) / 1e9
