"""`triptych.v1.Decode` over an engine: continues a prompt whose KV blocks lie elsewhere, and streams."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from typing import Any

import grpc

from core import logs
from core.convert import (
    finish_reason_to_proto,
    kv_handle_from_proto,
    placed_from_proto,
    priority_from_proto,
    request_id_from_proto,
    sampling_from_proto,
    spans_to_proto,
    tenant_from_proto,
    usage_to_proto,
)
from core.errors import EngineError, InvalidRequestError
from core.types import Stage, Usage
from engine.protocol import EngineCoreRequest, RequestOutput
from protos import common_pb2, decode_pb2, decode_pb2_grpc
from services.worker import Engine, Worker, check_expanded


class DecodeServicer(decode_pb2_grpc.DecodeServicer):  # type: ignore[misc]  # generated code has no types
    """One call a request, from its first token to its end."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Decode(  # noqa: N802 - the name of the RPC
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext[Any, decode_pb2.DecodeResponse]
    ) -> None:
        async with self._worker.guarded(context, "Decode.Decode"):
            engine = self._worker.engine
            core_request = _to_core(request, engine, self._worker.config.max_images_per_prompt)
            logs.request_id.set(request.request_id)
            # Written out instead of yielded: a cancelled call is cancelled at an await in here, so that the engine is
            # told at once and not when the garbage collector finds the generator.
            async with aclosing(engine.generate(core_request)) as outputs:
                async for output in outputs:
                    await context.write(_to_response(output))
                    if output.finished or output.missing:
                        return
            raise EngineError("the engine ended the request without a result")

    async def GetServerInfo(  # noqa: N802 - the name of the RPC
        self, request: common_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.ServerInfo:
        async with self._worker.guarded(context, "Decode.GetServerInfo"):
            return self._worker.server_info(Stage.DECODE)

    async def GetLoad(  # noqa: N802 - the name of the RPC
        self, request: common_pb2.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.Load:
        async with self._worker.guarded(context, "Decode.GetLoad"):
            return self._worker.load()


def _to_core(request: decode_pb2.DecodeRequest, engine: Engine, max_images: int) -> EngineCoreRequest:
    request_id = request_id_from_proto(request.request_id)
    tenant = tenant_from_proto(request.tenant)
    priority = priority_from_proto(request.priority)
    prompt_token_ids = list(request.prompt_token_ids)
    features = placed_from_proto(request.features)
    output_token_ids = list(request.output_token_ids)
    check_expanded(engine, prompt_token_ids, features, output_token_ids, max_images)
    if not output_token_ids:
        raise InvalidRequestError("output_token_ids is empty; it holds at least the token that prefill sampled")
    if not request.HasField("kv"):
        raise InvalidRequestError("kv is absent; decode continues what a prefill worker computed")
    if request.kv.tenant != tenant:
        raise InvalidRequestError("kv was computed for another tenant's request")
    return EngineCoreRequest(
        request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
        arrival_s=time.time(),
        prompt_token_ids=prompt_token_ids,
        features=features,
        sampling=sampling_from_proto(request.sampling),
        output_token_ids=output_token_ids,
        kv=kv_handle_from_proto(request.kv),
        tenant=tenant,
        priority=priority,
    )


def _to_response(output: RequestOutput) -> decode_pb2.DecodeResponse:
    response = decode_pb2.DecodeResponse(token_ids=output.token_ids, text=output.text)
    if output.missing:
        response.missing.CopyFrom(common_pb2.MissingItems(keys=output.missing))
    elif output.finished:
        response.finished.CopyFrom(
            decode_pb2.DecodeFinished(
                finish_reason=finish_reason_to_proto(output.finish_reason),
                usage=usage_to_proto(output.usage or Usage()),
                spans=spans_to_proto(output.spans),
            )
        )
    return response


def add_to_server(worker: Worker, server: grpc.aio.Server) -> str:
    """Serve it; returns the service's full name."""
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(worker), server)
    return str(decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name)
