"""Bad input ends at the router: INVALID_ARGUMENT that names the part and the limit, and no stage is called."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import grpc
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from protos import common_pb2, router_pb2
from router.door import _is_quick
from router.settings import MAX_IMAGE_BYTES
from tests.router.stubs import bitmap, chat, cluster, collect

Request = router_pb2.GenerateRequest


def with_url() -> Request:
    request = chat("a", b"one")
    request.chat.messages[0].content[1].image.url = "http://example.com/cat.png"
    return request


def with_image(data: bytes) -> Request:
    request = chat("a", b"one")
    request.chat.messages[0].content[1].image.data = data
    return request


def with_sampling(**fields: object) -> Request:
    request = chat("hello")
    request.sampling.MergeFrom(common_pb2.SamplingParams(**fields))
    return request


def with_role(role: str) -> Request:
    request = chat("hello")
    request.chat.messages[0].role = role
    return request


def with_empty_part() -> Request:
    request = chat("hello")
    request.chat.messages[0].content.add()
    return request


def with_unknown_field() -> Request:
    # Field 99 as a varint, which no version of the contract has.
    return Request.FromString(chat("hello").SerializeToString() + b"\x98\x06\x01")


def with_unknown_field_inside() -> Request:
    part = common_pb2.TextPart.FromString(b"\x0a\x02hi\x98\x06\x01")
    message = common_pb2.ChatMessage(role="user", content=[common_pb2.ContentPart(text=part)])
    return Request(chat=common_pb2.ChatPrompt(messages=[message]))


def malformed(channel: grpc.aio.Channel) -> object:
    """A call whose bytes are no GenerateRequest."""
    method = channel.unary_stream(
        "/triptych.v1.Router/Generate", response_deserializer=router_pb2.GenerateResponse.FromString
    )
    return method(b"\xff\xff\xff")


CASES: list[tuple[str, Callable[[], Request], str]] = [
    ("no prompt", Request, "prompt: neither chat nor tokens"),
    ("no messages", lambda: Request(chat=common_pb2.ChatPrompt()), "messages: none; at least 1 is needed"),
    ("no content", lambda: chat(), "messages[0].content is empty"),
    ("empty part", with_empty_part, "messages[0].content[1] is empty"),
    ("role", lambda: with_role("tool"), "messages[0].role='tool' is none of system, user, assistant"),
    ("url", with_url, "image 1: image URLs are not allowed on this server"),
    ("not an image", lambda: with_image(b"hello"), "image 1: not an image that can be read; supported are PNG"),
    ("pixels", lambda: with_image(bitmap(9000, 9000)), "image 1: 9000 x 9000 pixels; the limit is 64000000 in all"),
    ("no bytes", lambda: chat(b"one", b"", "?"), "image 2: it has no bytes"),
    (
        "image size",
        lambda: with_image(bytes(MAX_IMAGE_BYTES + 1)),
        f"image 1: {MAX_IMAGE_BYTES + 1} bytes, the limit is",
    ),
    ("too many images", lambda: chat(*[b"one"] * 5), "5 images, the limit is 4"),
    (
        "too many tokens",
        lambda: Request(tokens=common_pb2.TokenPrompt(token_ids=[1] * 4096)),
        "tokens.token_ids has 4096 entries; the limit is 4095",
    ),
    ("too many messages", lambda: Request(chat=common_pb2.ChatPrompt(messages=[{}] * 4097)), "the limit is 4096"),
    ("too many parts", lambda: chat(*["a"] * 4097), "messages[0].content has 4097 parts, the limit is 4096"),
    ("empty tokens", lambda: Request(tokens=common_pb2.TokenPrompt()), "tokens.token_ids is empty"),
    ("model", lambda: chat("hello", model="other"), "model='other' is not served here, only 'demo'"),
    ("request id", lambda: chat("hello", request_id="x" * 129), "request_id has 129 characters, more than 128"),
    ("temperature", lambda: with_sampling(temperature=3.0), "sampling.temperature"),
    ("top_p", lambda: with_sampling(top_p=0.0), "sampling.top_p"),
    ("stop", lambda: with_sampling(stop=["x"]), "sampling.stop is not supported"),
    ("unknown field", with_unknown_field, "number 99"),
    ("unknown field inside", with_unknown_field_inside, "number 99"),
]


async def test_refusals_name_part_and_limit() -> None:
    async with cluster() as c:
        for name, build, expected in CASES:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(c.stub.Generate(build()))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT, name
            assert expected in error.value.details(), name
        assert not c.encoders[0].requests + c.prefills[0].requests + c.decodes[0].requests
        counters = c.metrics.counters()
        assert counters['router_requests_total{outcome="refused"}'] == len(CASES)
        assert counters['router_requests_total{outcome="error"}'] == 0
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(malformed(c.channel))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "no message of the type" in error.value.details()
        # The same client is served the moment it asks for something that is allowed.
        await collect(c.stub.Generate(chat("hello", model="demo", request_id="x" * 128)))


def test_only_files_whose_head_is_cheap_are_looked_at_on_the_event_loop() -> None:
    """A few kilobytes of compressed text before the pixels take a hundred milliseconds to read."""
    pixels = Image.frombytes("RGB", (200, 200), random.Random(0).randbytes(120000))
    text = PngInfo()
    text.add_text("key", "a" * 100_000, zip=True)
    files = {}
    for name, options in {"PNG": {}, "JPEG": {}, "WEBP": {}, "compressed": {"format": "PNG", "pnginfo": text}}.items():
        out = io.BytesIO()
        pixels.save(out, **{"format": name, **options})
        assert len(out.getvalue()) > 8192
        files[name] = out.getvalue()
    files["large"] = files["PNG"] + bytes(1 << 20)
    files["no pixels"] = files["PNG"][:8] + bytes(10_000)
    quick = {name for name, data in files.items() if _is_quick(data)}
    assert quick == {"PNG", "JPEG"}
