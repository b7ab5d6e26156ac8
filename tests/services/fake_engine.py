"""`AsyncLLM`'s public methods without an engine behind them, for tests of what surrounds an engine.

It answers prompts with token ids that count up, leases a handle for each hand-over, and remembers what it was asked.
Closing `gate` holds every request where a real one would compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from core.errors import EngineError, InvalidRequestError
from core.keys import content_hash, item_key
from core.types import Feature, FinishReason, KVHandle, PlacedFeature, Span, Usage
from core.vision_grid import VisionGrid
from engine.protocol import EncodeOutput, EngineCoreRequest, EngineInfo, EngineStats, RequestOutput
from services.worker import Turn

NAMESPACE = "ab" * 32
VOCAB_SIZE = 1000
IMAGE_TOKEN = 7
WIDTH = 8


class FakePrompts:
    """One token a text part, one placeholder an image, expanded."""

    vocab_size = VOCAB_SIZE

    def process_chat(self, messages: Sequence[Turn], features: list[Feature]) -> tuple[list[int], list[PlacedFeature]]:
        kinds = [kind for _, content in messages for kind, _ in content]
        return self.process_tokens([IMAGE_TOKEN if kind == "image" else 1 for kind in kinds], features)

    def process_tokens(self, token_ids: list[int], features: list[Feature]) -> tuple[list[int], list[PlacedFeature]]:
        if token_ids.count(IMAGE_TOKEN) != len(features):
            raise InvalidRequestError("placeholders and images differ in number")
        left = list(features)
        expanded: list[int] = []
        placed = []
        for token_id in token_ids:
            if token_id == IMAGE_TOKEN:
                feature = left.pop(0)
                placed.append(PlacedFeature(feature, len(expanded)))
                expanded += [IMAGE_TOKEN] * feature.num_embeds
            else:
                expanded.append(token_id)
        return expanded, placed


class FakeEngine:
    def __init__(self) -> None:
        self.info = EngineInfo(
            pid=4242,
            family="fake",
            namespace_digest=NAMESPACE,
            dtype="float32",
            device="cpu",
            max_model_len=100,
            embed_width=WIDTH,
            kv_layout="version=1",
            weights_loaded_bytes=11,
            weights_skipped_bytes=22,
        )
        self.stats = EngineStats()
        self.vision_grid: VisionGrid | None = None
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.prompts: FakePrompts | None = FakePrompts()
        self.on_entered: Callable[[], None] = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.released_one = asyncio.Event()
        self.aborted_one = asyncio.Event()
        self.requests: list[EngineCoreRequest] = []
        self.encoded: list[tuple[str, str, bool]] = []
        self.released: list[str] = []
        self.aborted: list[str] = []
        self.missing: list[str] = []  # what every prompt lacks
        self.error: Exception | None = None  # what every request ends in
        self.finish_at_once = False
        self.stopped = False
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(self, reason: str) -> None:
        """What a lost engine process looks like."""
        self._death.set_result(reason)

    def set_leases(self, num_leases: int, kind: str = "kv_leases") -> None:
        self.stats = msgspec.structs.replace(self.stats, **{kind: num_leases})
        if self.on_stats is not None:
            self.on_stats(self.stats)

    async def wait_failed(self) -> str:
        return await asyncio.shield(self._death)

    async def _compute(self) -> None:
        self.entered.set()
        self.on_entered()
        gate = asyncio.ensure_future(self.gate.wait())
        try:
            await asyncio.wait({gate, self._death}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gate.cancel()
        if self._death.done():
            raise EngineError("lost")
        if self.error is not None:
            raise self.error

    async def encode(
        self, request_id: str, image: bytes, *, tenant: str = "", reported_missing: bool = False
    ) -> EncodeOutput:
        self.encoded.append((request_id, tenant, reported_missing))
        await self._compute()
        key = item_key(content_hash(image), NAMESPACE, tenant)
        return EncodeOutput(Feature(key, 4, (1, 4, 4), WIDTH), False, [Span("encode", 1.0, 2.0, "encoder-0")])

    async def generate(self, request: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        ended = False
        try:
            await self._compute()
            first = 100 + len(request.output_token_ids)
            usage = Usage(len(request.prompt_token_ids), 1, 0, 0)
            output = RequestOutput(request.request_id, [first], "a", usage=usage, spans=[Span("prefill", 1.0, 2.0)])
            if self.missing:
                ended = True
                yield RequestOutput(request.request_id, [], "", finished=True, missing=self.missing)
            elif self.finish_at_once:
                ended = True
                yield msgspec.structs.replace(output, finished=True, finish_reason=FinishReason.STOP)
            elif request.hand_over:
                ended = True
                handle = KVHandle("FakeConnector", request.request_id.encode(), len(request.prompt_token_ids))
                yield msgspec.structs.replace(output, finished=True, kv=handle)
            else:
                yield RequestOutput(request.request_id, [first], "b")
                await self._compute()
                ended = True
                yield RequestOutput(
                    request.request_id,
                    [first + 1],
                    "c",
                    finished=True,
                    finish_reason=FinishReason.LENGTH,
                    usage=usage,
                    spans=output.spans,
                )
        finally:
            if not ended:
                self.aborted.append(request.request_id)
                self.aborted_one.set()

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)
        self.released_one.set()

    async def shutdown(self) -> None:
        self.stopped = True
