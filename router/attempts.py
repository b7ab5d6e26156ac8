"""One call to one worker: what its end means, for the request and for the worker.

    the worker answered what makes sense                 the answer
    it refused the request, or the deadline passed       a TriptychError: it would be the same elsewhere
    it has gone, is full, is silent or talks nonsense    AttemptFailedError: another worker may do it
    the request was cancelled                            CancelledError

The fleet hears of all of them through the assignment.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from core.errors import (
    DeadlineExceededError,
    EngineError,
    IncompatibleError,
    InvalidRequestError,
    OverloadedError,
    StageUnavailableError,
    TriptychError,
)
from core.retry_after import retry_after_s
from core.types import Stage
from router.answers import NonsenseError
from router.assignment import Assignment
from router.watchdog import Wait, Watchdog

logger = logging.getLogger(__name__)

# How StageUnavailableError reads, with a stage or a worker's name in front: an UNAVAILABLE with other details is gRPC's
# own and names addresses.
_OURS = re.compile(r".{1,64}? is unavailable: ")


class RefusedElsewhereError(IncompatibleError):
    """A stage's FAILED_PRECONDITION, in its own words."""

    def __init__(self, details: str) -> None:
        TriptychError.__init__(self, details)


class AttemptFailedError(Exception):
    """What one worker could not do and another may. Never leaves the router.

    `reason` is a label of `router_retries_total`; `error` is what the client is told where nobody else can either;
    `was_lost`: the worker has gone, and what it did for the request with it.
    """

    def __init__(self, reason: str, error: TriptychError) -> None:
        super().__init__(str(error))
        self.reason = reason
        self.error = error

    @property
    def was_lost(self) -> bool:
        return self.reason == "unavailable"

    @property
    def is_broken(self) -> bool:
        return self.reason == "broken"


def refusal(stage: Stage, error: grpc.aio.AioRpcError) -> TriptychError | AttemptFailedError:
    """A stage's status as our exception: with the same code and details once it reaches the client."""
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(details)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return RefusedElsewhereError(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(f"the deadline passed in {stage}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            when_s = retry_after_s(error.trailing_metadata() or ())
            return AttemptFailedError("overloaded", OverloadedError(details, retry_after_s=when_s))
        # CANCELLED that nobody here asked for is a worker that is shutting down.
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            ours = _OURS.match(details)
            reason = details[ours.end() :] if ours else "none of its workers can be reached"
            return AttemptFailedError("unavailable", StageUnavailableError(stage, reason))
        case grpc.StatusCode.INTERNAL:
            return AttemptFailedError("broken", EngineError(details))
    logger.error("%s answered %s: %s", stage, code, details)
    return AttemptFailedError("broken", EngineError(f"{stage} failed"))


class Attempt:
    """`with assignment, Attempt(...) as attempt:` around a call, from its start to its last message. Event loop only.

    Tells the assignment how the call ended, ends the call where it still runs, and turns what went wrong into what the
    head of this file says. A worker that says nothing for `stall_s` seconds is left where `may_leave` says that
    another one would do.
    """

    __slots__ = ("_assignment", "_call", "_may_leave", "_wait", "_watchdog")

    def __init__(
        self, assignment: Assignment, call: Any, watchdog: Watchdog, stall_s: float, may_leave: Callable[[], bool]
    ) -> None:
        self._assignment = assignment
        self._call = call
        self._may_leave = may_leave
        self._watchdog = watchdog
        assignment.on_lost = call.cancel
        self._wait = watchdog.watch(stall_s, self._leave, since_s=asyncio.get_running_loop().time())

    def __enter__(self) -> Attempt:
        return self

    def heard(self) -> None:
        """The worker has spoken; until `listen`, whatever takes long is not its fault."""
        self._wait.since_s = None

    def listen(self, now_s: float) -> None:
        """It is the worker's turn again. `now_s`: the event loop's time."""
        self._wait.since_s = now_s

    def _leave(self, wait: Wait) -> bool:
        if not self._may_leave():
            return False
        self._call.cancel()
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assignment = self._assignment
        stage = assignment.work.stage
        self._watchdog.forget(self._wait)
        try:
            if error is None:
                assignment.succeeded()
            elif isinstance(error, grpc.aio.AioRpcError):
                assignment.failed(error)
                raise refusal(stage, error) from error
            elif isinstance(error, NonsenseError):
                assignment.misbehaved(str(error))
                raise AttemptFailedError("broken", error.error or EngineError(f"{stage} failed")) from error
            elif isinstance(error, asyncio.CancelledError) and not cancelled_by_us():
                if self._wait.is_overdue:
                    what = f"a worker has been silent for {self._wait.limit_s:g} s"
                    assignment.misbehaved(what)
                    raise AttemptFailedError("stalled", StageUnavailableError(stage, what)) from None
                # Either it was found lost, or grpc.aio says so of a stream that its server cancelled, as one does whose
                # drain has run out of time.
                assignment.failed(_ENDED)
                raise AttemptFailedError(
                    "unavailable", StageUnavailableError(stage, "none of its workers can be reached")
                ) from None
        finally:
            self._call.cancel()  # without effect on one that has ended


def cancelled_by_us() -> bool:
    """Whether this task was asked to stop."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


_ENDED = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "the worker ended the call"
)
