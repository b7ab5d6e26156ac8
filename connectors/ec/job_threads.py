"""Threads that run a connector's loads and saves, none of which outlives its time limit in the eyes of the engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

#: Threads that may hang in a store before no new ones take their place. With all of them stuck, jobs expire unbegun.
_MAX_STUCK = 8


class Job:
    """One piece of blocking work. `run` does it; `expired` is called instead of its result once the limit has passed.

    Exactly one of two things happens: `run` returns and `finish()` was True, or `expired` is called.
    """

    __slots__ = ("_ended", "_lock", "deadline_s", "expired", "is_running", "is_written_off", "run")

    def __init__(self, run: Callable[[Job], None], expired: Callable[[Job], None]) -> None:
        self.run = run
        self.expired = expired
        self.deadline_s = 0.0
        self.is_running = False
        self.is_written_off = False
        self._ended = False
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        return self._ended

    def finish(self) -> bool:
        """Claim the end of this job. True for the first caller alone: it reports, the other one keeps silent."""
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended


class JobThreads:
    """Runs jobs in the order of their submission, `num_threads` at a time, each for at most `timeout_s` from then on.

    A thread that a store holds past the limit cannot be stopped; it is written off, another takes its place, and it
    ends when the store lets it go. The threads are daemons, which those of `concurrent.futures` are not: a store that
    hangs must not keep a process from ending. The queue has no bound of its own; each job holds a slice of the encoder
    buffer, and that bounds it.
    """

    def __init__(self, num_threads: int, timeout_s: float, name: str) -> None:
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished: deque[Job] = deque()  # in the order of their deadlines, which is that of submission
        self._closed = False
        self._num_stuck = 0
        self._threads: list[threading.Thread] = []
        for _ in range(num_threads):
            self._start_thread()
        self._watch = threading.Thread(target=self._expire, name=f"{name}-watch", daemon=True)
        self._watch.start()

    def submit(self, job: Job) -> None:
        """Run `job` later. After `close`: dropped."""
        with self._changed:
            if self._closed:
                return
            job.deadline_s = time.monotonic() + self._timeout_s
            while self._unfinished and self._unfinished[0].is_over:
                self._unfinished.popleft()
            self._unfinished.append(job)
            if len(self._unfinished) == 1:
                self._changed.notify()
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Drop the jobs that have not begun and wait up to `timeout_s` for the others. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            threads = [*self._threads, self._watch]
        for _ in threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None or self._closed:
                return
            with self._changed:
                if job.is_over:
                    continue
                job.is_running = True
            try:
                job.run(job)
            except Exception:  # one job must not take the others' thread away
                log.exception("a connector's job failed")
            with self._changed:
                job.is_running = False
                if job.is_written_off:  # another thread has this one's place
                    self._num_stuck -= 1
                    self._threads.remove(threading.current_thread())
                    return

    def _expire(self) -> None:
        while True:
            with self._changed:
                while self._unfinished and self._unfinished[0].is_over:
                    self._unfinished.popleft()
                if self._closed:
                    return
                now_s = time.monotonic()
                if not self._unfinished or self._unfinished[0].deadline_s > now_s:
                    # With work under way the wait ends at the first deadline; what was finished by then is passed over.
                    self._changed.wait(self._unfinished[0].deadline_s - now_s if self._unfinished else None)
                    continue
                job = self._unfinished.popleft()
                if not job.finish():
                    continue
                if job.is_running and self._num_stuck < _MAX_STUCK:
                    job.is_written_off = True
                    self._num_stuck += 1
                    self._start_thread()
            job.expired(job)
