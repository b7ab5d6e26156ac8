"""`triptych.v1.Prefill` over an engine: computes a prompt and answers with its first token; the blocks stay, leased."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc

from core import logs
from core.convert import (
    features_from_proto,
    finish_reason_to_proto,
    kv_handle_from_proto,
    kv_handle_to_proto,
    placed_from_proto,
    placed_to_proto,
    priority_from_proto,
    request_id_from_proto,
    sampling_from_proto,
    spans_to_proto,
    tenant_from_proto,
    usage_to_proto,
)
from core.errors import EngineError, InvalidRequestError, TriptychError
from core.types import Feature, KVHandle, PlacedFeature, Stage, Usage
from engine.protocol import EngineCoreRequest, RequestOutput
from protos import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.prefill.leases import Leases
from services.worker import Engine, Turn, Worker, check_expanded, check_num_images

_INLINE_BYTES = 16 * 1024


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):  # type: ignore[misc]  # generated code has no types
    """One call a prompt."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._leases = Leases()
        self._releases: set[asyncio.Task[None]] = set()

    async def Prefill(  # noqa: N802 - the name of the RPC
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.PrefillResponse:
        async with self._worker.guarded(context, "Prefill.Prefill"):
            engine = self._worker.engine
            core_request = await self._to_core(request, engine)
            logs.request_id.set(request.request_id)
            try:
                output = await _first_output(engine, core_request)
                response = _to_response(core_request, output)
            except (asyncio.CancelledError, EngineError):
                # The engine may have handed over before it heard of the cancel, and nobody would learn of that lease.
                self._release_soon(engine, core_request.request_id)
                raise
            if output.kv is not None:
                self._leases.remember(output.kv, request.request_id, core_request.request_id)
                self._release_if_unsent(context, engine, output.kv)
            return response

    async def Release(  # noqa: N802 - the name of the RPC
        self, request: prefill_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.ReleaseResponse:
        async with self._worker.guarded(context, "Prefill.Release"):
            if request.HasField("kv"):
                engine_ids = self._leases.forget(kv_handle_from_proto(request.kv))
            else:
                # The caller gave up while the reply with the handle was under way.
                engine_ids = self._leases.forget_request(request_id_from_proto(request.request_id))
            for engine_id in engine_ids:
                await self._worker.engine.release(engine_id)
            return prefill_pb2.ReleaseResponse()

    async def GetServerInfo(  # noqa: N802 - the name of the RPC
        self, request: common_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.ServerInfo:
        async with self._worker.guarded(context, "Prefill.GetServerInfo"):
            return self._worker.server_info(Stage.PREFILL)

    async def GetLoad(  # noqa: N802 - the name of the RPC
        self, request: common_pb2.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.Load:
        async with self._worker.guarded(context, "Prefill.GetLoad"):
            return self._worker.load()

    def _release_if_unsent(self, context: grpc.aio.ServicerContext[Any, Any], engine: Engine, handle: KVHandle) -> None:
        """Give the lease up where the caller is seen to be gone before the reply is out. What the network loses after
        that, the caller's Release by request id or the lease's own end covers."""

        def on_done(ended: grpc.aio.ServicerContext[Any, Any]) -> None:
            remaining_s = ended.time_remaining()
            if not ended.done() or (remaining_s is not None and remaining_s <= 0):
                for engine_id in self._leases.forget(handle):
                    self._release_soon(engine, engine_id)

        context.add_done_callback(on_done)  # type: ignore[arg-type]  # the stubs want a class that only they have

    def _release_soon(self, engine: Engine, engine_id: str) -> None:
        # Its own task, because the call that wants it is being cancelled. The set keeps the task alive.
        async def release() -> None:
            with suppress(TriptychError):  # an engine that is gone holds no lease
                await engine.release(engine_id)

        task = asyncio.get_running_loop().create_task(release())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _to_core(self, request: prefill_pb2.PrefillRequest, engine: Engine) -> EngineCoreRequest:
        request_id = request_id_from_proto(request.request_id)
        tenant = tenant_from_proto(request.tenant)
        priority = priority_from_proto(request.priority)
        max_images = self._worker.config.max_images_per_prompt
        if request.ByteSize() > _INLINE_BYTES:
            # To tokenize a long text takes seconds, in which this event loop has others to answer.
            prompt_token_ids, placed, output_token_ids = await asyncio.to_thread(_prompt, request, engine, max_images)
        else:
            prompt_token_ids, placed, output_token_ids = _prompt(request, engine, max_images)
        return EngineCoreRequest(
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            arrival_s=time.time(),
            prompt_token_ids=prompt_token_ids,
            features=placed,
            sampling=sampling_from_proto(request.sampling),
            output_token_ids=output_token_ids,
            hand_over=True,
            tenant=tenant,
            priority=priority,
        )


def _prompt(
    request: prefill_pb2.PrefillRequest, engine: Engine, max_images: int
) -> tuple[list[int], list[PlacedFeature], list[int]]:
    """The expanded prompt, its features, and the tokens generated already."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("prompt is absent; it is one of chat, tokens and expanded")
    if kind == "expanded":
        if request.features:
            raise InvalidRequestError("features is to be empty beside expanded, which has its own")
        prompt_token_ids = list(request.expanded.prompt_token_ids)
        placed = placed_from_proto(request.expanded.features, name="expanded.features")
        output_token_ids = list(request.expanded.output_token_ids)
        check_expanded(engine, prompt_token_ids, placed, output_token_ids, max_images)
        return prompt_token_ids, placed, output_token_ids
    prompts = engine.prompts
    if prompts is None:
        raise EngineError("this engine has no prompt processor")
    features: list[Feature] = features_from_proto(request.features)
    check_num_images(len(features), max_images)
    if kind == "chat":
        return *prompts.process_chat(_turns(request.chat.messages), features), []
    _refuse_sources(request.tokens.images, "tokens.images")
    if len(request.tokens.images) != len(features):
        raise InvalidRequestError(f"tokens.images has {len(request.tokens.images)} entries, features {len(features)}")
    return *prompts.process_tokens(list(request.tokens.token_ids), features), []


def _turns(messages: Sequence[common_pb2.ChatMessage]) -> list[Turn]:
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        content: list[tuple[str, str | None]] = []
        for j, part in enumerate(message.content):
            kind = part.WhichOneof("part")
            if kind == "text":
                content.append(("text", part.text.text))
            elif kind == "image":
                _refuse_sources([part.image], f"chat.messages[{i}].content[{j}].image")
                content.append(("image", None))
            else:
                raise InvalidRequestError(f"chat.messages[{i}].content[{j}] is neither text nor image")
        turns.append((message.role, content))
    return turns


def _refuse_sources(images: Sequence[common_pb2.ImagePart], name: str) -> None:
    for image in images:
        if image.WhichOneof("source") is not None:
            raise InvalidRequestError(f"{name} carries an image; prefill takes the features that an encoder made of it")


async def _first_output(engine: Engine, core_request: EngineCoreRequest) -> RequestOutput:
    """The one output of a prompt that is handed over. Cancelled or failed, the engine has been told to stop."""
    async with aclosing(engine.generate(core_request)) as outputs:
        async for output in outputs:
            if output.finished or output.missing:
                return output
    raise EngineError("the engine ended the request without a result")


def _to_response(core_request: EngineCoreRequest, output: RequestOutput) -> prefill_pb2.PrefillResponse:
    spans = spans_to_proto(output.spans)
    if output.missing:
        return prefill_pb2.PrefillResponse(missing=common_pb2.MissingItems(keys=output.missing), spans=spans)
    if len(output.token_ids) != 1 or (output.kv is None) == (output.finish_reason is None):
        raise EngineError("the engine's result is not one token with either a handle or a reason to end")
    handle = None
    if output.kv is not None:
        handle = kv_handle_to_proto(output.kv)
        handle.tenant = core_request.tenant
    prefilled = prefill_pb2.Prefilled(
        prompt_token_ids=core_request.prompt_token_ids,
        features=placed_to_proto(core_request.features),
        token_id=output.token_ids[0],
        text=output.text,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        kv=handle,
        usage=usage_to_proto(output.usage or Usage()),
    )
    return prefill_pb2.PrefillResponse(prefilled=prefilled, spans=spans)


def add_to_server(worker: Worker, server: grpc.aio.Server) -> str:
    """Serve it; returns the service's full name."""
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(worker), server)
    return str(prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name)
