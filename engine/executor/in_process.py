"""The worker in the engine's own process: on a thread of its own, or on the engine's."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from core.errors import EngineError
from engine.executor.base import STOP_TIMEOUT_S, Executor, Handshakes, WorkerReport, WorkerSpec, wait_for_start
from engine.executor.worker import Worker
from engine.memory import CacheSizes
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")


class InProcessExecutor(Executor):
    """With `threaded`, steps run on a thread, `runner`, while the engine's goes on; torch lets go of the interpreter
    lock while it computes. Without, `execute_model` returns when the step is done. All else waits either way."""

    def __init__(self, spec: WorkerSpec, notify: Callable[[], None], *, threaded: bool) -> None:
        self._spec = spec
        self._notify = notify
        self._worker: Worker | None = None
        self._thread = _JobThread("runner") if threaded else None

    @property
    def worker(self) -> Worker:
        """For tests that look inside. Not while a step runs."""
        assert self._worker is not None
        return self._worker

    def load_model(self) -> WorkerReport:
        def load() -> WorkerReport:
            self._worker = Worker(self._spec, self._notify)
            return self._worker.load_model()

        return wait_for_start(self._run(load))

    def initialize_caches(self, sizes: CacheSizes) -> Handshakes:
        return wait_for_start(self._run(lambda: self.worker.initialize_caches(sizes)))

    def execute_model(self, out: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._run(lambda: self.worker.execute_model(out))

    def check_health(self) -> None:
        """A thread that is part of this process is as healthy as the process."""

    def shutdown(self) -> None:
        if self._thread is None:
            if self._worker is not None:
                self._worker.close()
        elif not self._thread.close(lambda: self._worker.close() if self._worker is not None else None):
            logger.warning("the step that runs did not end within %g s; its thread is left behind", STOP_TIMEOUT_S)

    def _run(self, job: Callable[[], T]) -> Future[T]:
        if self._thread is not None:
            return self._thread.submit(job)
        future: Future[T] = Future()
        _settle(future, job)
        return future


class _JobThread:
    """Runs jobs one after the other. Not a ThreadPoolExecutor: that one is joined without a limit of time when the
    interpreter ends."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Jobs are bounded by their callers: a start waits for each, and an engine for its oldest step."""
        future: Future[T] = Future()
        if self._closed:
            future.set_exception(EngineError("the executor has been shut down"))
        else:
            self._jobs.put((future, job))
        return future

    def close(self, last: Callable[[], None]) -> bool:
        """Run `last` after what is queued and end. False where that takes longer than STOP_TIMEOUT_S. Idempotent."""
        if not self._closed:
            self.submit(last)
            self._closed = True
            self._jobs.put(None)
        self._thread.join(STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            _settle(*item)
            del item  # the last step's inputs and outputs are not to live until the next step comes


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        result = job()
    except BaseException as error:  # whatever it is, it is the caller's to raise
        future.set_exception(error)
    else:
        future.set_result(result)
