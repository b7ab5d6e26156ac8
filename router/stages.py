"""Calls to workers: which of them is tried, for how long, and what their failures mean.

A worker that is UNAVAILABLE is passed over for each other worker of its stage once. Every other refusal would be the
same elsewhere and passes through with its code and details.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

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
from core.types import Stage
from protos import decode_pb2, encoder_pb2, prefill_pb2
from router.door import Deadline, Image
from router.fleet import Fleet
from router.metrics import RETRY_LABEL, RouterMetrics
from router.workers import Worker

logger = logging.getLogger(__name__)

# How StageUnavailableError reads, with a stage or a worker's name in front: an UNAVAILABLE with other details is gRPC's
# own and names addresses.
_OURS = re.compile(r".{1,64}? is unavailable: ")

T = TypeVar("T")


class RefusedElsewhereError(IncompatibleError):
    """A stage's FAILED_PRECONDITION, in its own words."""

    def __init__(self, details: str) -> None:
        TriptychError.__init__(self, details)


def is_unavailable(error: grpc.aio.AioRpcError) -> bool:
    """Whether another worker may succeed. CANCELLED that nobody here asked for is a worker that is shutting down."""
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def unavailable(stage: Stage, error: grpc.aio.AioRpcError | None) -> StageUnavailableError:
    details = (error.details() or "") if error is not None else ""
    ours = _OURS.match(details)
    return StageUnavailableError(stage, details[ours.end() :] if ours else "none of its workers can be reached")


def from_status(stage: Stage, error: grpc.aio.AioRpcError) -> TriptychError:
    """A stage's status as our exception: the same code and details once it reaches the client."""
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(details)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return RefusedElsewhereError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(f"the deadline passed in {stage}")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return unavailable(stage, error)
        case grpc.StatusCode.INTERNAL:
            return EngineError(details)
    logger.error("%s answered %s: %s", stage, code, details)
    return EngineError(f"{stage} failed")


class Stages:
    """The three stages as the pipeline calls them. One event loop; cancelling a caller cancels its call."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    async def encode(
        self, image: Image, *, request_id: str, tenant: str, deadline: Deadline, reported_missing: bool
    ) -> encoder_pb2.EncodeResponse:
        """Have one image encoded, at the worker where equal images meet if it can. `reported_missing`: a stage did not
        find its item, so the encoder must look afresh."""

        def call(worker: Worker) -> Any:
            request = encoder_pb2.EncodeRequest(
                request_id=request_id,
                image=image.read(),
                content_hash=image.content_hash,
                tenant=tenant,
                reported_missing=reported_missing,
            )
            return worker.stub.Encode(request, timeout=deadline.remaining())

        response: encoder_pb2.EncodeResponse
        _, response = await self._first(Stage.ENCODER, self._fleet.encoders.by_content(image.content_hash), call)
        return response

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, deadline: Deadline, abandoned: Callable[[Worker], None]
    ) -> tuple[Worker, prefill_pb2.PrefillResponse]:
        """Compute a prompt at the next worker in turn. Also returns who did it: it holds the blocks.

        `abandoned` is called with a worker whose reply will not be read though it may have been sent.
        """

        async def call(worker: Worker) -> prefill_pb2.PrefillResponse:
            try:
                response: prefill_pb2.PrefillResponse
                response = await worker.stub.Prefill(request, timeout=deadline.remaining())
                return response
            except asyncio.CancelledError:
                abandoned(worker)
                raise
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    abandoned(worker)
                raise

        return await self._first(Stage.PREFILL, self._fleet.prefills.by_turn(), call)

    def decode_workers(self) -> list[Worker]:
        return self._fleet.decodes.by_turn()

    def decode(self, worker: Worker, request: decode_pb2.DecodeRequest, deadline: Deadline) -> Any:
        """Begin a stream at one worker. The caller reads it, and cancels it where it stops reading."""
        return worker.stub.Decode(request, timeout=deadline.remaining())

    def failed(self, worker: Worker, error: grpc.aio.AioRpcError) -> None:
        """Note that a worker was UNAVAILABLE: others are tried first until it answers the next poll."""
        logger.warning("%s %s is unavailable: %s", worker.stage, worker.address, error.details())
        if not _OURS.match(error.details() or ""):
            worker.serving = False

    def count_retry(self, stage: Stage, reason: str) -> None:
        self._metrics.retries.labels(stage=RETRY_LABEL[stage], reason=reason).inc()

    async def _first(
        self, stage: Stage, workers: list[Worker], call: Callable[[Worker], Awaitable[T]]
    ) -> tuple[Worker, T]:
        last: grpc.aio.AioRpcError | None = None
        for worker in workers:
            if last is not None:
                self.count_retry(stage, "unavailable")
            try:
                return worker, await call(worker)
            except grpc.aio.AioRpcError as error:
                if not is_unavailable(error):
                    raise from_status(stage, error) from error
                self.failed(worker, error)
                last = error
        raise unavailable(stage, last)


def cancelled_by_us() -> bool:
    """Whether this task was asked to stop. Else a CancelledError is grpc.aio's word for a stream that its server
    cancelled, as one does whose drain has run out of time."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def ended_by_worker() -> grpc.aio.AioRpcError:
    """What such a stream's end is for us."""
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "the worker ended the stream"
    )
