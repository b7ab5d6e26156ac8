"""One request's way through encode, prefill and decode.

    encode every image, in parallel ──> prefill ──> first token to the client ──> decode ──> tokens to the client
            ^                             │ ^                                       │
            └───────── missing ───────────┘ └── missing, or the stream was lost ────┘

What went to the client is never sent again: after a loss, prefill gets the expanded prompt and all tokens so far, and
samples the next one. Each image is encoded a second time at most, and a stream is resumed after a loss once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

import grpc

from core.errors import EngineError, IncompatibleError, InvalidRequestError, StageUnavailableError
from core.keys import item_key
from core.types import Stage
from protos import common_pb2, decode_pb2, encoder_pb2, prefill_pb2, router_pb2
from router.door import Image, Job
from router.fleet import Fleet
from router.inflight import Inflight
from router.metrics import RouterMetrics
from router.releases import Releases
from router.stages import Stages, cancelled_by_us, ended_by_worker, from_status, is_unavailable, unavailable
from router.workers import Worker

logger = logging.getLogger(__name__)

#: A decode worker that was cancelled has ended its pull, and the lease with it, by then.
_PULL_ENDS_S = 0.5

Send = Callable[[router_pb2.GenerateResponse], Awaitable[None]]


class Pipeline:
    """What all requests share. One event loop."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self.fleet = fleet
        self.metrics = metrics
        self.stages = Stages(fleet, metrics)
        self.releases = Releases()
        self.inflight: Inflight[tuple[bytes, str, bool], encoder_pb2.EncodeResponse] = Inflight()

    async def run(self, job: Job, send: Send) -> None:
        """Answer one request through `send`, the last message with `finished`.

        Raises TriptychError. However it ends, cancellation included, no call of this request is left running and its
        KV blocks are pulled or given up.
        """
        run = _Run(self, job, send)
        try:
            await run.drive()
        finally:
            run.give_up_blocks(after_s=_PULL_ENDS_S)


class _Run:
    """The state of one request."""

    __slots__ = (
        "_decode_called", "_encoded_again", "_features", "_first_token_s", "_handle", "_images_by_key", "_job",
        "_lost_before", "_output", "_owner", "_prefilled", "_send", "_shared", "_spans", "_start_s",
    )  # fmt: skip

    def __init__(self, shared: Pipeline, job: Job, send: Send) -> None:
        self._shared = shared
        self._job = job
        self._send = send
        self._start_s = time.time()
        self._first_token_s = 0.0
        self._spans: list[common_pb2.Span] = []
        self._features: dict[bytes, common_pb2.Feature] = {}  # by content hash
        self._images_by_key: dict[str, Image] = {}
        self._encoded_again: set[str] = set()  # item keys
        self._prefilled: prefill_pb2.Prefilled | None = None  # the first one: its prompt and usage stand
        self._output: list[int] = []  # every token sent to the client
        self._handle: common_pb2.KvHandle | None = None  # blocks that nobody has pulled yet
        self._owner: Worker | None = None  # of those blocks
        self._lost_before = False  # a decode stream was lost and resumed
        self._decode_called = False  # somebody may be pulling the blocks

    async def drive(self) -> None:
        job = self._job
        # Equal images within the request are one image here, named by its first place.
        unique = {image.content_hash: image for image in reversed(job.images)}
        await self._encode(sorted(unique.values(), key=lambda image: image.number))
        request = prefill_pb2.PrefillRequest(
            request_id=job.request_id,
            chat=job.chat,
            tokens=job.tokens,
            features=[self._features[image.content_hash] for image in job.images],
            sampling=job.sampling,
            tenant=job.tenant,
            priority=job.priority,
        )
        while True:
            if await self._prefill(request):
                return
            if await self._decode():
                return
            request = self._resumed()

    def give_up_blocks(self, *, after_s: float = 0.0) -> None:
        """Release the blocks that no decode worker has pulled, if there are any; later where one may be at it."""
        if self._handle is not None and self._owner is not None:
            delay_s = after_s if self._decode_called else 0.0
            self._shared.releases.give_up(self._owner, self._job.request_id, self._handle, after_s=delay_s)
        self._handle = self._owner = None

    def _abandoned(self, worker: Worker) -> None:
        self._shared.releases.give_up(worker, self._job.request_id, None)

    # -- encode --

    async def _encode(self, images: Iterable[Image], *, reported_missing: bool = False) -> None:
        """Encode in parallel; the first failure cancels the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for image in images:
                    group.create_task(self._encode_one(image, reported_missing))
        except BaseExceptionGroup as failures:
            # One is enough for the client.
            raise failures.exceptions[0] from None

    async def _encode_one(self, image: Image, reported_missing: bool) -> None:
        job, shared = self._job, self._shared
        start_s = time.time()
        # A call that trusts the encoder's memory is no answer for one that must not.
        key = (image.content_hash, job.tenant, reported_missing)
        if key in shared.inflight:
            shared.metrics.images_joined.inc()
        try:
            response = await shared.inflight.get(
                key,
                lambda: shared.stages.encode(
                    image,
                    request_id=job.request_id,
                    tenant=job.tenant,
                    deadline=job.deadline,
                    reported_missing=reported_missing,
                ),
            )
        except InvalidRequestError as error:
            # The encoder sees one image and has no number for it.
            raise InvalidRequestError(f"image {image.number}: {str(error).removeprefix('image: ')}") from error
        feature = response.feature
        ours = item_key(image.content_hash, shared.fleet.namespace, job.tenant)
        if feature.key != ours:
            raise IncompatibleError("item key", ours, feature.key)
        self._features[image.content_hash] = feature
        self._images_by_key[feature.key] = image
        self._spans.extend(response.spans)
        if not any(span.name == "encode" for span in response.spans):
            note = "cached" if response.cached else ""
            self._spans.append(
                common_pb2.Span(name="encode", start_s=start_s, end_s=time.time(), where="router", note=note)
            )

    async def _encode_again(self, keys: Iterable[str], stage: Stage) -> None:
        images: list[Image] = []
        for key in dict.fromkeys(keys):
            image = self._images_by_key.get(key)
            if image is None:
                raise EngineError(f"{stage} misses an item that is not part of the request")
            if key in self._encoded_again:
                raise StageUnavailableError(
                    Stage.ENCODER, f"image {image.number} was encoded twice and {stage} still misses it"
                )
            self._encoded_again.add(key)
            self._shared.stages.count_retry(Stage.ENCODER, "missing")
            images.append(image)
        if not images:
            raise EngineError(f"{stage} misses items and names none")
        logger.warning("%s: %s misses %d items; encoding them again", self._job.request_id, stage, len(images))
        await self._encode(images, reported_missing=True)

    def _refresh_sources(self, features: Iterable[common_pb2.Feature]) -> None:
        """An item that was encoded again may lie elsewhere now."""
        for feature in features:
            feature.source = self._features[self._images_by_key[feature.key].content_hash].source

    # -- prefill --

    async def _prefill(self, request: prefill_pb2.PrefillRequest) -> bool:
        """Compute the prompt and send the token that it brings. True where that was the last one."""
        while True:
            self._owner, response = await self._shared.stages.prefill(request, self._job.deadline, self._abandoned)
            done: prefill_pb2.Prefilled = response.prefilled
            if done.HasField("kv"):
                self._handle = done.kv
            self._spans.extend(response.spans)
            outcome = response.WhichOneof("outcome")
            if outcome == "prefilled":
                break
            if outcome is None:
                raise EngineError("prefill answered nothing")
            await self._encode_again(response.missing.keys, Stage.PREFILL)
            self._refresh_sources(request.features)
            self._refresh_sources(placed.feature for placed in request.expanded.features)
        if self._prefilled is None:
            self._prefilled = done
            self._first_token_s = time.time()
            self._shared.metrics.time_to_first_token.observe(self._first_token_s - self._start_s)
            self._shared.metrics.prompt_tokens.inc(len(done.prompt_token_ids))
        self._output.append(done.token_id)
        finished = done.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
        if not finished and self._handle is None:
            raise EngineError("prefill neither finished the request nor kept its blocks")
        await self._tokens([done.token_id], done.text, done.finish_reason if finished else None)
        return finished

    # -- decode --

    async def _decode(self) -> bool:
        """Stream until the end. True where it was reached, False where prefill is to continue."""
        assert self._prefilled is not None
        job, stages = self._job, self._shared.stages
        request = decode_pb2.DecodeRequest(
            request_id=job.request_id,
            prompt_token_ids=self._prefilled.prompt_token_ids,
            features=self._prefilled.features,
            output_token_ids=self._output,
            sampling=job.sampling,
            kv=self._handle,
            tenant=job.tenant,
            priority=job.priority,
        )
        before = len(self._output)
        last: grpc.aio.AioRpcError | None = None
        for worker in stages.decode_workers():
            if last is not None:
                stages.count_retry(Stage.DECODE, "unavailable")
            try:
                return await self._follow(worker, request)
            except grpc.aio.AioRpcError as error:
                if not is_unavailable(error):
                    raise from_status(Stage.DECODE, error) from error
                stages.failed(worker, error)
                last = error
                if len(self._output) > before:
                    break  # its blocks are gone, and with them what another worker could pull
        self.give_up_blocks()
        if len(self._output) == before or self._lost_before:
            raise unavailable(Stage.DECODE, last)
        self._lost_before = True
        stages.count_retry(Stage.DECODE, "lost")
        logger.warning("%s: decode was lost after %d tokens; resuming", job.request_id, len(self._output))
        return False

    async def _follow(self, worker: Worker, request: decode_pb2.DecodeRequest) -> bool:
        """Read one worker's stream. Raises AioRpcError where it breaks; returns as `_decode` does."""
        self._decode_called = True
        call = self._shared.stages.decode(worker, request, self._job.deadline)
        try:
            async for message in call:
                if message.HasField("missing"):
                    self.give_up_blocks()
                    await self._encode_again(message.missing.keys, Stage.DECODE)
                    assert self._prefilled is not None
                    self._refresh_sources(placed.feature for placed in self._prefilled.features)
                    return False
                # It has tokens, so it has the blocks.
                self._handle = self._owner = None
                self._output.extend(message.token_ids)
                if message.HasField("finished"):
                    self._spans.extend(message.finished.spans)
                    await self._tokens(message.token_ids, message.text, message.finished.finish_reason)
                    return True
                await self._tokens(message.token_ids, message.text, None)
        except asyncio.CancelledError:
            if cancelled_by_us():
                raise
            raise ended_by_worker() from None
        finally:
            call.cancel()
        raise EngineError("decode ended its stream without an end")

    def _resumed(self) -> prefill_pb2.PrefillRequest:
        assert self._prefilled is not None
        return prefill_pb2.PrefillRequest(
            request_id=self._job.request_id,
            expanded=prefill_pb2.ExpandedPrompt(
                prompt_token_ids=self._prefilled.prompt_token_ids,
                features=self._prefilled.features,
                output_token_ids=self._output,
            ),
            sampling=self._job.sampling,
            tenant=self._job.tenant,
            priority=self._job.priority,
        )

    # -- to the client --

    async def _tokens(self, token_ids: Iterable[int], text: str, reason: common_pb2.FinishReason | None) -> None:
        response = router_pb2.GenerateResponse(request_id=self._job.shown_id, token_ids=token_ids, text=text)
        if reason is not None:
            response.finished.CopyFrom(self._finished(reason))
        await self._send(response)

    def _finished(self, reason: common_pb2.FinishReason) -> router_pb2.GenerateFinished:
        assert self._prefilled is not None
        metrics, end_s, num_output = self._shared.metrics, time.time(), len(self._output)
        metrics.generation_tokens.inc(num_output)
        metrics.e2e_latency.observe(end_s - self._start_s)
        if num_output > 1:
            metrics.time_per_output_token.observe((end_s - self._first_token_s) / (num_output - 1))
        note = f"first token after {self._first_token_s - self._start_s:.3f} s"
        timeline = [
            common_pb2.Span(name="request", start_s=self._start_s, end_s=end_s, where="router", note=note),
            *sorted(self._spans, key=lambda span: span.start_s),
        ]
        usage = common_pb2.Usage(
            prompt_tokens=len(self._prefilled.prompt_token_ids),
            completion_tokens=num_output,
            cached_tokens=self._prefilled.usage.cached_tokens,
            image_tokens=sum(placed.feature.num_embeds for placed in self._prefilled.features),
        )
        return router_pb2.GenerateFinished(finish_reason=reason, usage=usage, timeline=timeline)
