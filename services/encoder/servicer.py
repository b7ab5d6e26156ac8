"""`triptych.v1.Encoder` over an engine: checks the image's hash and size, and translates."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import grpc

from core import logs
from core.convert import feature_to_proto, request_id_from_proto, spans_to_proto, tenant_from_proto
from core.errors import InvalidRequestError
from core.keys import DIGEST_BYTES, content_hash
from core.types import Stage
from protos import common_pb2, encoder_pb2, encoder_pb2_grpc
from services.worker import Worker

MAX_IMAGE_BYTES = 32 * 1024 * 1024
# Hashing a large file would hold up every other call on this event loop.
_HASH_INLINE_BYTES = 256 * 1024


class EncoderServicer(encoder_pb2_grpc.EncoderServicer):  # type: ignore[misc]  # generated code has no types
    """One call an image."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Encode(  # noqa: N802 - the name of the RPC
        self, request: encoder_pb2.EncodeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> encoder_pb2.EncodeResponse:
        async with self._worker.guarded(context, "Encoder.Encode"):
            engine = self._worker.engine
            request_id = request_id_from_proto(request.request_id)
            logs.request_id.set(request_id)
            tenant = tenant_from_proto(request.tenant)
            await _check_image(request.image, request.content_hash)
            # Several images of one request share its id; the engine needs them apart.
            encoded = await engine.encode(
                f"{request_id}-{uuid.uuid4().hex[:8]}",
                request.image,
                tenant=tenant,
                reported_missing=request.reported_missing,
            )
            return encoder_pb2.EncodeResponse(
                feature=feature_to_proto(encoded.feature), cached=encoded.cached, spans=spans_to_proto(encoded.spans)
            )

    async def GetServerInfo(  # noqa: N802 - the name of the RPC
        self, request: common_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.ServerInfo:
        async with self._worker.guarded(context, "Encoder.GetServerInfo"):
            return self._worker.server_info(Stage.ENCODER)

    async def GetLoad(  # noqa: N802 - the name of the RPC
        self, request: common_pb2.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> common_pb2.Load:
        async with self._worker.guarded(context, "Encoder.GetLoad"):
            return self._worker.load()


async def _check_image(image: bytes, claimed_hash: bytes) -> None:
    if not image:
        raise InvalidRequestError("image is empty")
    if len(image) > MAX_IMAGE_BYTES:
        raise InvalidRequestError(f"image has {len(image)} bytes, more than {MAX_IMAGE_BYTES}")
    if len(claimed_hash) != DIGEST_BYTES:
        raise InvalidRequestError(f"content_hash has {len(claimed_hash)} bytes, not {DIGEST_BYTES}")
    if len(image) > _HASH_INLINE_BYTES:
        actual = await asyncio.to_thread(content_hash, image)
    else:
        actual = content_hash(image)
    if actual != claimed_hash:
        # The key of the item comes from this hash: a wrong one would give these embeddings another image's name.
        raise InvalidRequestError("content_hash is not the BLAKE3 of image")


def add_to_server(worker: Worker, server: grpc.aio.Server) -> str:
    """Serve it; returns the service's full name."""
    encoder_pb2_grpc.add_EncoderServicer_to_server(EncoderServicer(worker), server)
    return str(encoder_pb2.DESCRIPTOR.services_by_name["Encoder"].full_name)
