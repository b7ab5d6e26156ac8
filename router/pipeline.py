"""One request's way through encode, prefill and decode.

    encode every image, in parallel ──> prefill ──> first token to the client ──> decode ──> tokens to the client
            ^                             │ ^                                       │
            └───────── missing ───────────┘ └── missing, or the stream was lost ────┘

What went to the client is never sent again: after a loss, prefill gets the expanded prompt and all tokens so far, and
samples the next one, so that a stream survives its decode worker as often as the request's allowance says. An image
whose item has vanished is encoded again, at most once for each token that this brings.

A decode worker is chosen once prefill has answered and the first token is out. Earlier, what is known of its load would
be older, by a prefill that may take seconds; and it would gain nothing, since a decode worker allocates the blocks when
it gets the handle and the pull takes longer than that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from core.errors import InvalidRequestError, RequestCancelledError, StageUnavailableError
from core.types import Stage
from protos import common_pb2, decode_pb2, encoder_pb2, prefill_pb2, router_pb2
from router.answers import check_decoded
from router.attempts import AttemptFailedError
from router.door import Image, Job
from router.fleet import Fleet
from router.inflight import Inflight
from router.metrics import RouterMetrics
from router.outlet import Outlet, Send
from router.releases import Releases
from router.retries import Allowance, RetryBudget
from router.stages import Patience, Search, Stages
from router.watchdog import Watchdog
from router.workers import Worker

logger = logging.getLogger(__name__)

#: More tokens than any model's length allows, where the client set no limit.
_NO_LIMIT = 1 << 31


class Pipeline:
    """What all requests share. One event loop."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, patience: Patience | None = None) -> None:
        self.fleet = fleet
        self.metrics = metrics
        self.patience = patience or Patience()
        self.watchdog = Watchdog()
        self.budget = RetryBudget()
        self.stages = Stages(fleet, metrics, self.watchdog, self.patience)
        self.releases = Releases()
        self.inflight: Inflight[tuple[bytes, str, bool], encoder_pb2.EncodeResponse] = Inflight()

    async def run(self, job: Job, send: Send) -> None:
        """Answer one request through `send`, the last message with `finished`.

        Raises TriptychError. However it ends, cancellation included, no call of this request is left running and its
        KV blocks are pulled or given up. A client that takes nothing of what is sent to it ends its request; until
        then the engines do not wait for it, since a decode worker goes on and keeps the tokens.
        """
        outlet = Outlet(send, self.watchdog, self.patience.client_s)
        run = _Run(self, job, outlet)
        try:
            await run.drive()
        except asyncio.CancelledError:
            if outlet.is_stuck and outlet.task.uncancel() == 0:
                raise RequestCancelledError(f"the client took nothing for {self.patience.client_s:g} s") from None
            raise
        finally:
            outlet.close()
            run.give_up_blocks()


class _Run:
    """The state of one request."""

    __slots__ = (
        "_allowance", "_encoded_again", "_features", "_first_token_s", "_handle", "_images_by_key", "_job",
        "_max_tokens", "_missing", "_now", "_outlet", "_output", "_owner", "_prefilled", "_request", "_shared",
        "_spans", "_start_s",
    )  # fmt: skip

    def __init__(self, shared: Pipeline, job: Job, outlet: Outlet) -> None:
        self._shared = shared
        self._job = job
        self._outlet = outlet
        self._allowance = Allowance(shared.budget)
        self._now = asyncio.get_running_loop().time
        self._start_s = time.time()
        self._first_token_s = 0.0
        self._spans: list[common_pb2.Span] = []
        self._features: dict[bytes, common_pb2.Feature] = {}  # by content hash
        self._images_by_key: dict[str, Image] = {}
        self._encoded_again: set[str] = set()  # item keys
        self._request: prefill_pb2.PrefillRequest | None = None  # as it was sent first
        self._prefilled: prefill_pb2.Prefilled | None = None  # the first one: its prompt and usage stand
        self._output: list[int] = []  # every token sent to the client
        self._missing: list[str] = []  # items that a decode worker could not find
        self._max_tokens = job.sampling.max_tokens if job.sampling.HasField("max_tokens") else _NO_LIMIT
        self._handle: common_pb2.KvHandle | None = None  # blocks that nobody has pulled yet
        self._owner: Worker | None = None  # of those blocks

    async def drive(self) -> None:
        job = self._job
        if job.images:
            # Equal images within the request are one image here, named by its first place.
            unique = {image.content_hash: image for image in reversed(job.images)}
            await self._encode(sorted(unique.values(), key=lambda image: image.number))
        request = self._request = prefill_pb2.PrefillRequest(
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

    def give_up_blocks(self) -> None:
        """Release the blocks that no decode worker has pulled, if there are any."""
        if self._handle is not None and self._owner is not None:
            self._shared.releases.give_up(self._owner, self._job.request_id, self._handle)
        self._handle = self._owner = None

    def _abandoned(self, worker: Worker, call_id: str) -> None:
        self._shared.releases.give_up(worker, call_id, None)

    # -- encode --

    async def _encode(self, images: list[Image], *, reported_missing: bool = False) -> None:
        """Encode in parallel; the first failure cancels the others."""
        if len(images) == 1:
            await self._encode_one(images[0], reported_missing)
            return
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
                lambda: shared.stages.encode(image, job, self._allowance, reported_missing=reported_missing),
            )
        except InvalidRequestError as error:
            # The encoder sees one image and has no number for it.
            raise InvalidRequestError(f"image {image.number}: {str(error).removeprefix('image: ')}") from error
        feature = response.feature
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
            image = self._images_by_key[key]
            if key in self._encoded_again:
                raise StageUnavailableError(
                    Stage.ENCODER, f"image {image.number} was encoded twice and {stage} still misses it"
                )
            self._encoded_again.add(key)
            self._shared.stages.count_retry(Stage.ENCODER, "missing")
            images.append(image)
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
            self._owner, response = await self._shared.stages.prefill(
                request,
                self._job,
                self._allowance,
                keys=self._images_by_key,
                original=self._request if self._request is not request else None,
                abandoned=self._abandoned,
            )
            self._spans.extend(response.spans)
            if response.WhichOneof("outcome") == "prefilled":
                break
            await self._encode_again(response.missing.keys, Stage.PREFILL)
            self._refresh_sources(request.features)
            self._refresh_sources(placed.feature for placed in request.expanded.features)
        done: prefill_pb2.Prefilled = response.prefilled
        if done.HasField("kv"):
            self._handle = done.kv
        if self._prefilled is None:
            self._prefilled = done
            self._first_token_s = time.time()
            self._shared.metrics.time_to_first_token.observe(self._first_token_s - self._start_s)
            self._shared.metrics.prompt_tokens.inc(len(done.prompt_token_ids))
        self._output.append(done.token_id)
        self._encoded_again.clear()  # they were found; a decode worker short of memory may still need them later
        finished = done.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
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
        num_before = len(self._output)
        work = stages.fleet.decode_work(
            prompt_tokens=len(self._prefilled.prompt_token_ids) + num_before,
            max_tokens=self._max_tokens - num_before if self._max_tokens != _NO_LIMIT else 0,
        )
        search = Search(stages, work, self._allowance)
        while (assignment := await search.next()) is not None:
            try:
                await stages.decode(assignment, request, job, search, self._take)
            except AttemptFailedError as failure:
                search.failed(failure)
            else:
                if not self._missing:
                    return True
                self.give_up_blocks()
                missing, self._missing = self._missing, []
                await self._encode_again(missing, Stage.DECODE)
                self._refresh_sources(placed.feature for placed in self._prefilled.features)
                return False
            if len(self._output) > num_before:
                break  # its blocks are gone, and with them what another worker could pull
        self.give_up_blocks()
        if search.failure is None or search.failure.reason == "overloaded" or not stages.is_serving(Stage.DECODE):
            raise search.error
        # Also where none of them said a word: the blocks themselves may be what they all failed at.
        stages.count_retry(Stage.DECODE, "lost")
        logger.warning("%s: decode was lost after %d tokens; resuming", job.request_id, len(self._output))
        return False

    async def _take(self, message: decode_pb2.DecodeResponse) -> bool:
        """One message of a decode stream; True where there is no use in another."""
        check_decoded(message, self._images_by_key, self._max_tokens - len(self._output))
        if message.HasField("missing"):
            self._missing = list(message.missing.keys)
            return True
        # It has tokens, so it has the blocks.
        self._handle = self._owner = None
        token_ids = message.token_ids
        self._output.extend(token_ids)
        if not message.HasField("finished"):
            await self._tokens(token_ids, message.text, None)
            return False
        self._spans.extend(message.finished.spans)
        await self._tokens(token_ids, message.text, message.finished.finish_reason)
        return True

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
        await self._outlet.send(response, self._now())

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
