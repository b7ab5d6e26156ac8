"""What the command line says to a router: requests, and errors in one line."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from protos import common_pb2, router_pb2


def image_request(
    prompt: str, images: Sequence[bytes], sampling: common_pb2.SamplingParams
) -> router_pb2.GenerateRequest:
    """One user message: the images in order, then the text."""
    content = [common_pb2.ContentPart(image=common_pb2.ImagePart(data=image)) for image in images]
    content.append(common_pb2.ContentPart(text=common_pb2.TextPart(text=prompt)))
    message = common_pb2.ChatMessage(role="user", content=content)
    return router_pb2.GenerateRequest(chat=common_pb2.ChatPrompt(messages=[message]), sampling=sampling)


def describe(error: grpc.RpcError) -> str:
    """`CODE: details`."""
    return f"{error.code().name}: {error.details()}"
