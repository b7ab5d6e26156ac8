"""Stub workers of all three stages in one process, on one port: they answer at once, and right as far as it shows."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from core.keys import item_key
from core.server import GrpcServer
from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

NAMESPACE = "ab" * 32
_NUM_EMBEDS = 196
_PROMPT = [*range(20), *[9] * _NUM_EMBEDS, *range(20)]
_NAMES = ["triptych.v1.Encoder", "triptych.v1.Prefill", "triptych.v1.Decode"]


class _Common:
    stage = ""

    async def GetServerInfo(self, request: Any, context: Any) -> common_pb2.ServerInfo:  # noqa: N802
        return common_pb2.ServerInfo(
            stage=self.stage, instance_id="1", model="demo", family="qwen3_vl", namespace_digest=NAMESPACE,
            embed_width=8, dtype="float32", max_model_len=4096, kv_layout="layout-1", max_images_per_prompt=4,
        )  # fmt: skip

    async def GetLoad(self, request: Any, context: Any) -> common_pb2.Load:  # noqa: N802
        return common_pb2.Load(kv_blocks_total=1 << 20)


class StubEncoder(_Common, encoder_pb2_grpc.EncoderServicer):  # type: ignore[misc]  # generated code has no types
    stage = "encoder"

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Any) -> encoder_pb2.EncodeResponse:  # noqa: N802
        key = item_key(request.content_hash, NAMESPACE, request.tenant)
        feature = common_pb2.Feature(key=key, modality="image", num_embeds=_NUM_EMBEDS, grid=[1, 28, 28], width=8)
        span = common_pb2.Span(name="encode", start_s=1.0, end_s=2.0, where="encoder-0")
        return encoder_pb2.EncodeResponse(feature=feature, spans=[span])


class StubPrefill(_Common, prefill_pb2_grpc.PrefillServicer):  # type: ignore[misc]
    stage = "prefill"

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> prefill_pb2.PrefillResponse:  # noqa: N802
        placed = [common_pb2.PlacedFeature(feature=feature, offset=20) for feature in request.features]
        done = prefill_pb2.Prefilled(
            prompt_token_ids=_PROMPT, features=placed, token_id=100, text="a ",
            kv=common_pb2.KvHandle(connector="Stub", params=b"x" * 200, num_tokens=len(_PROMPT)),
            usage=common_pb2.Usage(prompt_tokens=len(_PROMPT)),
        )  # fmt: skip
        span = common_pb2.Span(name="prefill", start_s=2.0, end_s=3.0, where="prefill-0")
        return prefill_pb2.PrefillResponse(prefilled=done, spans=[span])

    async def Release(self, request: prefill_pb2.ReleaseRequest, context: Any) -> prefill_pb2.ReleaseResponse:  # noqa: N802
        return prefill_pb2.ReleaseResponse()


class StubDecode(_Common, decode_pb2_grpc.DecodeServicer):  # type: ignore[misc]
    stage = "decode"

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> None:  # noqa: N802
        left = request.sampling.max_tokens - len(request.output_token_ids)
        for i in range(left):
            message = decode_pb2.DecodeResponse(token_ids=[200 + i], text="word ")
            if i == left - 1:
                message.finished.CopyFrom(
                    decode_pb2.DecodeFinished(
                        finish_reason=common_pb2.FINISH_REASON_LENGTH,
                        spans=[common_pb2.Span(name="decode", start_s=3.0, end_s=5.0, where="decode-0")],
                    )
                )
            await context.write(message)


async def serve() -> None:
    """Serve on a free port until the signal; prints `ready stub grpc=HOST:PORT`."""
    server = GrpcServer("127.0.0.1", 0)
    grpc_server: grpc.aio.Server = server.server
    encoder_pb2_grpc.add_EncoderServicer_to_server(StubEncoder(), grpc_server)
    prefill_pb2_grpc.add_PrefillServicer_to_server(StubPrefill(), grpc_server)
    decode_pb2_grpc.add_DecodeServicer_to_server(StubDecode(), grpc_server)
    await server.start(_NAMES)
    server.set_serving(True)
    print(f"ready stub grpc={server.bound}", flush=True)
    await server.wait_for_signal()
    await server.drain(0)


if __name__ == "__main__":
    asyncio.run(serve())
