"""A bare `grpc.aio` pass-through: the calls and messages of the router's way through the stages, and nothing else.

No checks, no hashing, no choice of workers, no retries, no metrics. What it costs is what gRPC and Python cost.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from core.server import CHANNEL_OPTIONS, GrpcServer
from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

_HASH = bytes(32)


class PassThrough(router_pb2_grpc.RouterServicer):  # type: ignore[misc]  # generated code has no types
    """Event loop only."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._encode = encoder_pb2_grpc.EncoderStub(channel).Encode
        self._prefill = prefill_pb2_grpc.PrefillStub(channel).Prefill
        self._decode = decode_pb2_grpc.DecodeStub(channel).Decode

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> None:  # noqa: N802
        parts = request.chat.messages[0].content
        encoded = await self._encode(encoder_pb2.EncodeRequest(image=parts[0].image.data, content_hash=_HASH))
        chat = common_pb2.ChatPrompt()
        content = chat.messages.add(role="user").content
        content.add().image.SetInParent()
        content.add().text.text = parts[1].text.text
        response = await self._prefill(
            prefill_pb2.PrefillRequest(chat=chat, features=[encoded.feature], sampling=request.sampling)
        )
        done = response.prefilled
        await context.write(router_pb2.GenerateResponse(token_ids=[done.token_id], text=done.text))
        call = self._decode(
            decode_pb2.DecodeRequest(
                prompt_token_ids=done.prompt_token_ids,
                features=done.features,
                output_token_ids=[done.token_id],
                sampling=request.sampling,
                kv=done.kv,
            )
        )
        async for message in call:
            passed = router_pb2.GenerateResponse(token_ids=message.token_ids, text=message.text)
            if message.HasField("finished"):
                passed.finished.finish_reason = message.finished.finish_reason
            await context.write(passed)


async def serve(target: str) -> None:
    """Serve on a free port until the signal; prints `ready passthrough grpc=HOST:PORT`."""
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        server = GrpcServer("127.0.0.1", 0)
        router_pb2_grpc.add_RouterServicer_to_server(PassThrough(channel), server.server)
        await server.start(["triptych.v1.Router"])
        server.set_serving(True)
        print(f"ready passthrough grpc={server.bound}", flush=True)
        await server.wait_for_signal()
        await server.drain(0)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
