"""Calls to the three stages: which worker is asked, and who is asked next where one fails.

A worker that has gone, is full, silent or wrong is passed over for another one of its stage, as often as the request's
allowance says. Once all were tried they are tried once more, where they have gone and the fleet counts on one of them
all the same: it may be back. Every other refusal would be the same elsewhere and passes through with code and details.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec

from core.errors import DeadlineExceededError, OverloadedError, StageUnavailableError, TriptychError
from core.keys import item_key
from core.types import Stage
from protos import decode_pb2, encoder_pb2, prefill_pb2
from router.answers import NonsenseError, check_encoded, check_prefilled
from router.assignment import Assignment
from router.attempts import Attempt, AttemptFailedError
from router.door import Image, Job
from router.fleet import Fleet
from router.metrics import RETRY_LABEL, RouterMetrics
from router.retries import Allowance, backoff_s
from router.watchdog import Watchdog
from router.work import Work
from router.workers import Worker

#: As after so many failures: time for what fell together to come back.
_BEFORE_REPEATING = 3

Take = Callable[[decode_pb2.DecodeResponse], Awaitable[bool]]


class Patience(msgspec.Struct, frozen=True):
    """How long the router waits for a word, in seconds."""

    stall_s: float = 30.0  # from a worker, before another one is asked instead
    client_s: float = 30.0  # until a client takes what is sent to it


class Stages:
    """The three stages as the pipeline calls them. One event loop; cancelling a caller cancels its call."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, watchdog: Watchdog, patience: Patience) -> None:
        self.fleet = fleet
        self._metrics = metrics
        self._watchdog = watchdog
        self._patience = patience

    async def encode(
        self, image: Image, job: Job, allowance: Allowance, *, reported_missing: bool
    ) -> encoder_pb2.EncodeResponse:
        """Have one image encoded, at the worker where equal images meet if it can. `reported_missing`: a stage did not
        find its item, so the encoder must look afresh. The item is the one that we expect."""
        key = item_key(image.content_hash, self.fleet.namespace, job.tenant)
        search = Search(self, self.fleet.encode_work(image, job.tenant), allowance)
        while (assignment := await search.next()) is not None:
            request = encoder_pb2.EncodeRequest(
                request_id=job.request_id,
                image=image.read(),
                content_hash=image.content_hash,
                tenant=job.tenant,
                reported_missing=reported_missing,
            )
            try:
                with assignment:
                    call = assignment.worker.stub.Encode(request, timeout=job.deadline.for_stage())
                    with self._attempt(assignment, call, search):
                        response: encoder_pb2.EncodeResponse = await call
                        check_encoded(response, key)
                        return response
            except AttemptFailedError as failure:
                search.failed(failure)
        raise search.error

    async def prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        job: Job,
        allowance: Allowance,
        *,
        keys: Collection[str],
        original: prefill_pb2.PrefillRequest | None,
        abandoned: Callable[[Worker, str], None],
    ) -> tuple[Worker, prefill_pb2.PrefillResponse]:
        """Compute a prompt. Also returns who did it: it holds the blocks. `keys`: of the request's items; `original`:
        see `Fleet.prefill_work`.

        Each call has a request id of its own, so that giving up what one of them left behind cannot hit another.
        `abandoned` is told of each call that may have left a lease: its worker and that id.
        """
        search = Search(self, self.fleet.prefill_work(request, original), allowance)
        while (assignment := await search.next()) is not None:
            worker = assignment.worker
            request.request_id = job.call_id()
            try:
                with assignment:
                    call = worker.stub.Prefill(request, timeout=job.deadline.for_stage())
                    with self._attempt(assignment, call, search):
                        response: prefill_pb2.PrefillResponse = await call
                        check_prefilled(response, keys)
                        return worker, response
            except AttemptFailedError as failure:
                if failure.reason != "overloaded":
                    abandoned(worker, request.request_id)
                search.failed(failure)
            except (asyncio.CancelledError, DeadlineExceededError):
                abandoned(worker, request.request_id)
                raise
        raise search.error

    async def decode(
        self, assignment: Assignment, request: decode_pb2.DecodeRequest, job: Job, search: Search, take: Take
    ) -> None:
        """Read one worker's stream; `take` gets each message and answers True for the last one it wants.

        Raises AttemptFailedError where the stream breaks, and what `take` raises.
        """
        now_s = asyncio.get_running_loop().time
        with assignment:
            call = assignment.worker.stub.Decode(request, timeout=job.deadline.for_stage())
            with self._attempt(assignment, call, search) as attempt:
                is_first = True
                async for message in call:
                    attempt.heard()
                    if is_first:
                        is_first = False
                        assignment.answered()
                    if await take(message):
                        return
                    attempt.listen(now_s())
                raise NonsenseError("it ended its stream without an end")

    def is_serving(self, stage: Stage) -> bool:
        """Whether the fleet counts on some worker of the stage."""
        return all(pool.stage is not stage for pool in self.fleet.missing())

    def count_retry(self, stage: Stage, reason: str) -> None:
        self._metrics.retries.labels(stage=RETRY_LABEL[stage], reason=reason).inc()

    def _attempt(self, assignment: Assignment, call: Any, search: Search) -> Attempt:
        return Attempt(assignment, call, self._watchdog, self._patience.stall_s, search.may_leave)


def _keep_soonest(last: TriptychError, error: TriptychError) -> None:
    """Where all that were asked are full, the one that has room first says when to come again."""
    if isinstance(last, OverloadedError) and isinstance(error, OverloadedError) and last.retry_after_s is not None:
        error.retry_after_s = min(last.retry_after_s, error.retry_after_s or last.retry_after_s)


class Search:
    """The workers of one stage, one after the other, for one piece of work. Event loop only."""

    __slots__ = ("_allowance", "_current", "_stages", "_tried", "_was_repeated", "_work", "failure")

    def __init__(self, stages: Stages, work: Work, allowance: Allowance) -> None:
        self._stages = stages
        self._work = work
        self._allowance = allowance
        self._tried: list[Worker] = []
        self._current: Worker | None = None
        self._was_repeated = False
        #: Why the last attempt was not the last.
        self.failure: AttemptFailedError | None = None

    async def next(self) -> Assignment | None:
        """Another worker to ask, after a pause where several have failed. None: there is nobody left."""
        if self.failure is None:
            return self._choose()
        if len(self._tried) > 1:
            await asyncio.sleep(backoff_s(len(self._tried)))
        assignment = self._choose()
        if assignment is None and not self._was_repeated and self.failure.was_lost:
            self._was_repeated = True
            await asyncio.sleep(backoff_s(_BEFORE_REPEATING))
            if not self._stages.is_serving(self._work.stage):
                return None
            self._tried.clear()
            assignment = self._choose()
        if assignment is not None:
            self._stages.count_retry(self._work.stage, self.failure.reason)
        return assignment

    def failed(self, failure: AttemptFailedError) -> None:
        """Go on to another worker. Raises the failure's error where the request may try no more."""
        if self.failure is not None:
            _keep_soonest(self.failure.error, failure.error)
        self.failure = failure
        assert self._current is not None
        self._tried.append(self._current)
        if not self._allowance.take(was_lost=failure.was_lost, is_broken=failure.is_broken):
            raise failure.error

    def may_leave(self) -> bool:
        """Whether there is another worker than the one that is asked now, and the request may try once more."""
        assert self._current is not None
        avoid = (*self._tried, self._current)
        now_s = asyncio.get_running_loop().time()
        is_there = any(
            worker.stage is self._work.stage and worker.usable(now_s) and worker not in avoid
            for worker in self._stages.fleet.workers()
        )
        return is_there and self._allowance.may_retry

    @property
    def error(self) -> TriptychError:
        """What the client is told once there is nobody left."""
        if self.failure is not None:
            return self.failure.error
        return StageUnavailableError(self._work.stage, "none of its workers can be reached")

    def _choose(self) -> Assignment | None:
        assignment = self._stages.fleet.choose(self._work, avoid=self._tried)
        self._current = assignment.worker if assignment is not None else None
        return assignment
