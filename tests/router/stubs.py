"""The three stages as small programmable servers on real sockets, and a router in this process that drives them.

The stubs hold no model: the n-th token of every answer is 100 + n and its text `<n>`, so a token that is repeated,
skipped or made up shows at once.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc

from core.keys import item_key
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
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.servicer import SERVICE_NAME, RouterServicer
from router.settings import RouterSettings
from router.stages import Patience

NAMESPACE = "ab" * 32
NUM_EMBEDS = 4
PLACEHOLDER = 9
FIRST_TOKEN = 100


def text_of(token_ids: list[int]) -> str:
    return "".join(f"<{token - FIRST_TOKEN}>" for token in token_ids)


class Stub:
    """What the three have in common: recorded requests, a gate to hold calls at, failures to give once each."""

    service_name = ""
    stage = ""

    def __init__(self, **info: object) -> None:
        values = {
            "stage": self.stage,
            "model": "demo",
            "family": "qwen3_vl",
            "namespace_digest": NAMESPACE,
            "embed_width": 8,
            "dtype": "float32",
            "max_model_len": 4096,
            "kv_layout": "" if self.stage == "encoder" else "layout-1",
            "max_images_per_prompt": 4,
        }
        self.info = common_pb2.ServerInfo(**{**values, **info})
        self.requests: list = []
        self.time_left_s: list[float] = []
        self.failures: list[tuple[grpc.StatusCode, str]] = []
        self.gate: asyncio.Event | None = None
        self.answers: list = []  # given instead of sound ones, once each
        self.entered = asyncio.Queue()  # one entry for each call that began
        self.cancelled = asyncio.Event()
        self.num_running = self.max_running = 0
        self.server: GrpcServer | None = None

    async def start(self, port: int = 0) -> str:
        self.server = GrpcServer("127.0.0.1", port)
        self.add_to(self.server.server)
        await self.server.start([self.service_name])
        self.server.set_serving(True)
        return self.server.bound

    @property
    def address(self) -> str:
        return self.server.bound

    async def stop(self) -> None:
        await self.server.drain(0)

    async def begin(self, request, context) -> None:
        self.requests.append(request)
        self.time_left_s.append(context.time_remaining())
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        self.entered.put_nowait(request.request_id)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.num_running -= 1
        if self.failures:
            await context.abort(*self.failures.pop(0))

    async def GetServerInfo(self, request, context):  # noqa: N802
        return self.info

    async def GetLoad(self, request, context):  # noqa: N802
        return common_pb2.Load()


class StubEncoder(Stub, encoder_pb2_grpc.EncoderServicer):
    service_name = "triptych.v1.Encoder"
    stage = "encoder"

    def add_to(self, server) -> None:
        encoder_pb2_grpc.add_EncoderServicer_to_server(self, server)

    async def Encode(self, request, context):  # noqa: N802
        await self.begin(request, context)
        if self.answers:
            return self.answers.pop(0)
        key = item_key(request.content_hash, self.info.namespace_digest, request.tenant)
        source = f"call {len(self.requests)}"  # an item that is made again lies elsewhere
        feature = common_pb2.Feature(
            key=key, modality="image", num_embeds=NUM_EMBEDS, grid=[1, 4, 4], width=8, source=source
        )
        spans = [common_pb2.Span(name="encode", start_s=1.0, end_s=2.0, where="encoder-0")]
        return encoder_pb2.EncodeResponse(feature=feature, spans=spans)


class StubPrefill(Stub, prefill_pb2_grpc.PrefillServicer):
    service_name = "triptych.v1.Prefill"
    stage = "prefill"

    def __init__(self, **info: object) -> None:
        super().__init__(**info)
        self.missing: list[list[int]] = []  # for each call to come: which images (by place) it misses
        self.leases: set[bytes] = set()
        self.released = asyncio.Queue()
        self._numbers = itertools.count()

    def add_to(self, server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def Prefill(self, request, context):  # noqa: N802
        await self.begin(request, context)
        if self.answers:
            return self.answers.pop(0)
        if self.missing:
            keys = [request.features[i].key for i in self.missing.pop(0)]
            if keys:
                return prefill_pb2.PrefillResponse(missing=common_pb2.MissingItems(keys=keys))
        prompt, placed, output = self._expand(request)
        token = FIRST_TOKEN + len(output)
        done = prefill_pb2.Prefilled(
            prompt_token_ids=prompt, features=placed, token_id=token, text=text_of([token]),
            usage=common_pb2.Usage(prompt_tokens=len(prompt), cached_tokens=2),
        )  # fmt: skip
        if len(output) + 1 == request.sampling.max_tokens:
            done.finish_reason = common_pb2.FINISH_REASON_LENGTH
        else:
            params = b"lease-%d" % next(self._numbers)
            self.leases.add(params)
            done.kv.CopyFrom(common_pb2.KvHandle(connector="Stub", params=params, num_tokens=len(prompt)))
        return prefill_pb2.PrefillResponse(
            prefilled=done, spans=[common_pb2.Span(name="prefill", start_s=2.0, end_s=3.0, where="prefill-0")]
        )

    def _expand(self, request):
        if request.WhichOneof("prompt") == "expanded":
            expanded = request.expanded
            return expanded.prompt_token_ids, expanded.features, list(expanded.output_token_ids)
        features, prompt, placed = iter(request.features), [], []

        def image():
            feature = next(features)
            placed.append(common_pb2.PlacedFeature(feature=feature, offset=len(prompt)))
            prompt.extend([PLACEHOLDER] * feature.num_embeds)

        if request.WhichOneof("prompt") == "tokens":
            for token in request.tokens.token_ids:
                image() if token == PLACEHOLDER else prompt.append(token)
        else:
            for message in request.chat.messages:
                for part in message.content:
                    image() if part.HasField("image") else prompt.extend(part.text.text.encode())
        return prompt, placed, []

    async def Release(self, request, context):  # noqa: N802
        self.leases.discard(request.kv.params)
        self.released.put_nowait(request)
        return prefill_pb2.ReleaseResponse()


class StubDecode(Stub, decode_pb2_grpc.DecodeServicer):
    service_name = "triptych.v1.Decode"
    stage = "decode"

    def __init__(self, prefills: list[StubPrefill], **info: object) -> None:
        super().__init__(**info)
        self.prefills = prefills
        self.lose_after: int | None = None  # tokens of the next stream, then UNAVAILABLE
        self.always_lose_after: int | None = None  # likewise, of every stream
        self.text_bytes = 0  # that each token's text has besides
        self.num_streams = 0
        self.missing_after: int | None = None  # tokens of the next stream, then the first image is missing
        self.hold_after: int | None = None  # tokens, then wait to be cancelled

    def add_to(self, server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def Decode(self, request, context):  # noqa: N802
        self.num_streams += 1
        try:
            async for message in self._stream(request, context):
                yield message
        finally:
            self.num_streams -= 1

    async def _stream(self, request, context):
        await self.begin(request, context)
        if self.answers:
            yield self.answers.pop(0)
            return
        if self.missing_after != 0:
            for prefill in self.prefills:
                prefill.leases.discard(request.kv.params)
        num_output = len(request.output_token_ids)
        assert list(request.output_token_ids) == [FIRST_TOKEN + i for i in range(num_output)]
        for sent in range(request.sampling.max_tokens - num_output):
            if sent in (self.lose_after, self.always_lose_after):
                self.lose_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "decode is unavailable: told to go")
            if sent == self.missing_after:
                self.missing_after = None
                yield decode_pb2.DecodeResponse(missing=common_pb2.MissingItems(keys=[request.features[0].feature.key]))
                return
            if sent == self.hold_after:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            token = FIRST_TOKEN + num_output + sent
            yield decode_pb2.DecodeResponse(token_ids=[token], text=text_of([token]) + "x" * self.text_bytes)
        spans = [
            common_pb2.Span(name="kv_transfer", start_s=3.0, end_s=3.5, where="decode-0"),
            common_pb2.Span(name="decode", start_s=3.5, end_s=5.0, where="decode-0"),
        ]
        reason = common_pb2.FINISH_REASON_LENGTH
        yield decode_pb2.DecodeResponse(finished=decode_pb2.DecodeFinished(finish_reason=reason, spans=spans))


class Cluster(SimpleNamespace):
    """Stubs and a router. `stub` is a client's; `retries(stage, reason)` reads the router's counter."""

    encoders: list[StubEncoder]
    prefills: list[StubPrefill]
    decodes: list[StubDecode]
    pipeline: Pipeline
    address: str

    def retries(self, stage: str, reason: str) -> int:
        name = f'router_retries_total{{stage="{stage}",reason="{reason}"}}'
        return self.metrics.counters()[name]

    def total_retries(self) -> int:
        return self.metrics.counters()["router_retries_total"]


@asynccontextmanager
async def cluster(
    encoders: int = 1, prefills: int = 1, decodes: int = 1, patience: Patience | None = None, **settings
) -> AsyncIterator[Cluster]:
    """Start everything; stop it at the end, and see to it that nothing is left in flight."""
    prefill_stubs = [StubPrefill() for _ in range(prefills)]
    stubs = {
        "encoders": [StubEncoder() for _ in range(encoders)],
        "prefills": prefill_stubs,
        "decodes": [StubDecode(prefill_stubs) for _ in range(decodes)],
    }
    addresses = {name: tuple([await stub.start() for stub in those]) for name, those in stubs.items()}
    config = RouterSettings(host="127.0.0.1", port=0, **addresses, **settings)
    metrics = RouterMetrics()
    fleet = Fleet(config)
    pipeline = Pipeline(fleet, metrics, patience)
    servicer = RouterServicer(config, pipeline, metrics)
    server = GrpcServer("127.0.0.1", 0)
    router_pb2_grpc.add_RouterServicer_to_server(servicer, server.server)
    await server.start([SERVICE_NAME])
    try:
        async with asyncio.timeout(60):
            await fleet.wait_until_serving()
        servicer.ready = True
        server.set_serving(True)
        async with grpc.aio.insecure_channel(server.bound, options=CHANNEL_OPTIONS) as channel:
            yield Cluster(
                **stubs, pipeline=pipeline, metrics=metrics, fleet=fleet, address=server.bound,
                channel=channel, stub=router_pb2_grpc.RouterStub(channel),
            )  # fmt: skip
        await server.drain(10)
        assert len(pipeline.inflight) == len(pipeline.watchdog) == 0
        assert metrics.running._value.get() == 0
    finally:
        await server.drain(0)
        await pipeline.releases.close()
        await fleet.close()
        for stub in itertools.chain(*stubs.values()):
            await stub.stop()


def bitmap(width: int, height: int) -> bytes:
    """A bitmap without its pixels."""
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def image_file(name: bytes) -> bytes:
    """A file that is an image by its header, which is all that the router looks at, and unlike those of other names."""
    return bitmap(1, 1) + name


def chat(*parts: str | bytes, max_tokens: int = 5, **fields) -> router_pb2.GenerateRequest:
    """One user message: text as str, an image by its name as bytes; `b""` is an image without bytes."""
    content = [
        common_pb2.ContentPart(text=common_pb2.TextPart(text=part))
        if isinstance(part, str)
        else common_pb2.ContentPart(image=common_pb2.ImagePart(data=image_file(part) if part else b""))
        for part in parts
    ]
    message = common_pb2.ChatMessage(role="user", content=content)
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens)
    return router_pb2.GenerateRequest(chat=common_pb2.ChatPrompt(messages=[message]), sampling=sampling, **fields)


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """Wait for what wakes nobody: a counter of the router's."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def collect(call) -> tuple[list[int], str, router_pb2.GenerateFinished]:
    """Read a whole answer."""
    token_ids, text, finished = [], "", None
    async for response in call:
        assert finished is None
        token_ids.extend(response.token_ids)
        text += response.text
        if response.HasField("finished"):
            finished = response.finished
    assert finished is not None
    return token_ids, text, finished
