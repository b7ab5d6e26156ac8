"""`triptych.v1.Router` on the wire: admits a request, hands it to the pipeline, and turns its end into a status."""

from __future__ import annotations

import asyncio
import logging
import uuid

import grpc

from core import logs
from core.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, StageUnavailableError
from core.server import guarded
from core.types import Stage
from core.version import version
from protos import common_pb2, router_pb2, router_pb2_grpc
from router.admission import Admission
from router.door import Deadline, admit
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.settings import RouterSettings
from router.tenants import tenant_of

logger = logging.getLogger(__name__)

SERVICE_NAME = "triptych.v1.Router"
#: A worker that begins to serve is known that soon.
_LOOK_AGAIN_S = 1.0


class RouterServicer(router_pb2_grpc.RouterServicer):  # type: ignore[misc]  # generated code has no types
    """Event loop only. `ready` is set by the entry point: the router takes requests. What a request lacks after that is
    its own error."""

    def __init__(self, settings: RouterSettings, pipeline: Pipeline, metrics: RouterMetrics) -> None:
        self.ready = False
        self._settings = settings
        self._pipeline = pipeline
        self._metrics = metrics
        self._admission = Admission(settings, metrics, lambda: pipeline.fleet.kv_capacity)
        self._instance_id = uuid.uuid4().hex

    async def Generate(  # noqa: N802 - the name of the RPC
        self,
        request: router_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[router_pb2.GenerateRequest, router_pb2.GenerateResponse],
    ) -> None:
        # Writes instead of yielding: a generator that is cancelled while its message is being sent would not learn of
        # it before it is collected.
        async with guarded(context, "Router.Generate", _say_when):
            outcome = "error"
            try:
                await self._generate(request, context)
                outcome = "ok"
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            except (InvalidRequestError, OverloadedError):
                outcome = "refused"
                raise
            finally:
                self._metrics.requests.labels(outcome=outcome).inc()

    async def _generate(
        self,
        request: router_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[router_pb2.GenerateRequest, router_pb2.GenerateResponse],
    ) -> None:
        if not self.ready or not self._pipeline.fleet.has_agreed:
            for pool in self._pipeline.fleet.missing():
                raise StageUnavailableError(pool.stage, "none of its workers serves yet")
            raise StageUnavailableError(Stage.ROUTER, "it is starting or stopping")
        time_remaining = context.time_remaining()
        deadline = Deadline(self._settings.request_timeout_s if time_remaining is None else time_remaining)
        fleet, admission = self._pipeline.fleet, self._admission
        tenant = tenant_of(context.invocation_metadata() or (), trust_header=self._settings.trust_tenant_header)
        with admission.request(tenant):
            try:
                async with asyncio.timeout_at(deadline.at):
                    job = await admit(
                        request,
                        deadline=deadline,
                        served_model=fleet.language_info.model,
                        max_images=fleet.max_images_per_prompt,
                        max_model_len=fleet.max_model_len,
                    )
                    logs.request_id.set(job.request_id)
                    logger.debug("request %s is the client's %r", job.request_id, job.shown_id)
                    job.tenant = tenant
                    with admission.images(sum(image.size_bytes for image in job.images), tenant):
                        async with admission.turn(tenant, fleet.request_tokens(job), job.priority):
                            await self._pipeline.run(job, context.write)
            except TimeoutError:
                raise DeadlineExceededError("the deadline passed") from None

    async def GetServerInfo(  # noqa: N802 - the name of the RPC
        self,
        request: common_pb2.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[common_pb2.GetServerInfoRequest, common_pb2.ServerInfo],
    ) -> common_pb2.ServerInfo:
        async with guarded(context, "Router.GetServerInfo"):
            info = common_pb2.ServerInfo(version=version(), stage=Stage.ROUTER.value, instance_id=self._instance_id)
            fleet = self._pipeline.fleet
            if self.ready and fleet.has_agreed:
                language = fleet.language_info
                info.model = language.model
                info.family = language.family
                info.namespace_digest = language.namespace_digest
                info.dtype = language.dtype
                info.embed_width = language.embed_width
                info.max_model_len = fleet.max_model_len
                info.max_images_per_prompt = fleet.max_images_per_prompt
            return info

    async def GetLoad(  # noqa: N802 - the name of the RPC
        self,
        request: common_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[common_pb2.GetLoadRequest, common_pb2.Load],
    ) -> common_pb2.Load:
        async with guarded(context, "Router.GetLoad"):
            return common_pb2.Load(
                num_requests_running=self._admission.num_running,
                num_requests_waiting=self._admission.num_waiting,
                counters=self._metrics.counters(),
            )


async def _say_when(error: Exception) -> Exception:
    """A stage that has no worker now may have one a moment later."""
    if isinstance(error, StageUnavailableError):
        error.retry_after_s = _LOOK_AGAIN_S
    return error
