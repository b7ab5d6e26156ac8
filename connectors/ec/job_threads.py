"""A few threads that run a connector's loads and saves."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

Job = Callable[[], None]


class JobThreads:
    """Runs jobs in the order of their submission, `num_threads` at a time.

    The threads are daemons, which those of `concurrent.futures` are not: a store that hangs must not keep a process
    from ending. The queue has no bound of its own; each job holds a slice of the encoder buffer, and that bounds it.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Run `job` later. It reports its own failures; one that raises is logged. After `close`: dropped."""
        if not self._closed.is_set():
            self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Drop the jobs that have not begun and wait up to `timeout_s` for the others. Idempotent."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None or self._closed.is_set():
                return
            try:
                job()
            except Exception:
                log.exception("a connector's job failed")
