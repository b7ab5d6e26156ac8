"""AsyncLLM: an engine for servers. Text and images go in, tokens and their text come out; torch stays in the engine.

Imports no torch: this is what a process that speaks gRPC holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from msgspec.structs import replace

from core.config import EngineConfig
from core.errors import EngineError, IncompatibleError, InvalidRequestError, OverloadedError, StageUnavailableError
from core.images import ImageHeader, read_header
from core.keys import content_hash, item_key
from core.types import Feature, PlacedFeature, SamplingParams
from core.vision_grid import VisionGrid
from engine.client import AsyncMPClient
from engine.detokenizer import IncrementalDetokenizer
from engine.prompts import PromptProcessor
from engine.protocol import (
    EncodeOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineInfo,
    EngineStats,
    ErrorKind,
    RequestOutput,
)

logger = logging.getLogger(__name__)


class _Stream:
    """Where one request's outputs wait for its reader. Outputs that come faster than they are read become one, so a
    reader that stalls costs no more than its tokens."""

    def __init__(self) -> None:
        self._pending: EngineCoreOutput | None = None
        self._error: Exception | None = None
        self._event = asyncio.Event()

    def put(self, output: EngineCoreOutput) -> None:
        if self._pending is not None:
            output.new_token_ids = [*self._pending.new_token_ids, *output.new_token_ids]
        self._pending = output
        self._event.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._event.set()

    async def get(self) -> EngineCoreOutput:
        await self._event.wait()
        self._event.clear()
        if self._pending is None:
            assert self._error is not None
            raise self._error
        output, self._pending = self._pending, None
        if self._error is not None:
            self._event.set()
        return output


class AsyncLLM:
    """One engine process and the requests in it. Every method on the event loop."""

    def __init__(self, config: EngineConfig, client: AsyncMPClient, info: EngineInfo) -> None:
        self.config = config
        self.info = info
        self.stats = EngineStats(kv_blocks_total=info.num_blocks, encoder_cache_bytes_total=info.encoder_cache_bytes)
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.prompts: PromptProcessor | None = None
        if config.ec_role.consumes:
            self.prompts = PromptProcessor(
                config.model, max_model_len=info.max_model_len, max_images=config.max_images_per_prompt
            )
        self.vision_grid = VisionGrid.from_model(Path(config.model)) if config.ec_role.produces else None
        self._client = client
        self._streams: dict[str, _Stream] = {}
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._gone = ""  # why no request is taken any more
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncLLM:
        """Start the engine's process and wait until it serves. Raises ConfigError or EngineError."""
        _check_model(config)
        client = AsyncMPClient(config)
        info = await client.start()
        try:
            return cls(config, client, info)
        except BaseException:
            await client.close()
            raise

    async def shutdown(self) -> None:
        """Stop the engine. Requests that are left end with StageUnavailableError."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._fail_all("the worker is stopping")
        await self._client.close()

    async def wait_failed(self) -> str:
        """Returns the reason once the engine has died; until then it waits."""
        return await asyncio.shield(self._dead)

    # ---- work ----

    async def encode(
        self, request_id: str, image: bytes, *, tenant: str = "", reported_missing: bool = False
    ) -> EncodeOutput:
        """Have an image's embeddings in the store. Raises TriptychError; cancelling it drops the request."""
        if self.vision_grid is None:
            raise IncompatibleError("the role", self.config.ec_role, "a request to encode")
        # In a thread: a large file takes long to hash, and a header may be made to take long.
        header, digest = await asyncio.to_thread(_look_at, image)
        grid, num_embeds = self.vision_grid.predict(header.width, header.height)
        key = item_key(digest, self.info.namespace_digest, tenant)
        feature = Feature(key, num_embeds, grid, self.info.embed_width)
        request = EngineCoreRequest(
            _unique(request_id), time.time(), image=image, feature=feature, reported_missing=reported_missing
        )
        async with contextlib.aclosing(self._submit(request)) as outputs:
            async for output in outputs:
                feature = replace(feature, source=output.item_source)
                return EncodeOutput(feature, output.encoded_cached, output.spans)
        raise EngineError("the encode request ended without an answer")

    async def generate(self, request: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None]:
        """Tokens and text until the last item, which has `finished` or `missing`. Raises TriptychError; closing the
        iterator aborts the request."""
        if self.prompts is None:
            raise IncompatibleError("the role", self.config.ec_role, "a request to generate")
        self._check(request)
        request.eos_token_ids = list(self.prompts.eos_token_ids)
        sampling = request.sampling or SamplingParams()
        detokenizer = IncrementalDetokenizer(
            self.prompts.tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            prior_token_ids=request.output_token_ids,
        )
        async with contextlib.aclosing(self._submit(request)) as outputs:
            async for output in outputs:
                text = detokenizer.push(output.new_token_ids)
                if output.finished and output.kv is None and not output.missing:
                    text += detokenizer.finish()
                yield RequestOutput(
                    request_id=request.request_id,
                    token_ids=output.new_token_ids,
                    text=text,
                    finished=output.finished,
                    finish_reason=output.finish_reason,
                    kv=output.kv,
                    missing=output.missing,
                    spans=output.spans,
                    usage=output.usage,
                )

    async def release(self, request_id: str) -> None:
        """Give up the lease of a finished prefill. Unknown ids are ignored."""
        with contextlib.suppress(EngineError):  # an engine that is gone holds nothing
            await self._client.release([request_id])

    # ---- inside ----

    def _check(self, request: EngineCoreRequest) -> None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise InvalidRequestError("prompt: has no tokens")
        if num_tokens + len(request.output_token_ids) >= self.info.max_model_len:
            raise InvalidRequestError(
                f"prompt: {num_tokens} tokens and {len(request.output_token_ids)} generated ones leave no room, "
                f"max_model_len is {self.info.max_model_len}"
            )
        for i, placed in enumerate(request.features, start=1):
            self._check_feature(placed, num_tokens, f"image {i}")

    def _check_feature(self, placed: PlacedFeature, num_tokens: int, part: str) -> None:
        if placed.feature.width != self.info.embed_width:
            raise IncompatibleError(f"{part}: embedding width", self.info.embed_width, placed.feature.width)
        if placed.end > num_tokens:
            raise InvalidRequestError(f"{part}: ends at token {placed.end} of a prompt of {num_tokens}")

    async def _submit(self, request: EngineCoreRequest) -> AsyncGenerator[EngineCoreOutput, None]:
        if self._gone:
            raise StageUnavailableError(self.config.where, self._gone)
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        stream = self._streams[request.request_id] = _Stream()
        ended = False
        try:
            try:
                await self._client.add(request)
            except EngineError as error:
                raise StageUnavailableError(self.config.where, str(error)) from None
            while not ended:
                output = await stream.get()
                ended = output.finished
                if output.error_kind is not None:
                    raise _error(output, self.config.where)
                yield output
        finally:
            del self._streams[request.request_id]
            if not ended and not self._gone:
                with contextlib.suppress(EngineError):  # as in `release`
                    await self._client.abort([request.request_id])
                    if request.hand_over:
                        # It may have ended meanwhile, with a handle that nobody will read.
                        await self._client.release([request.request_id])

    async def _read(self) -> None:
        try:
            while True:
                made = await self._client.receive()
                for output in made.outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:  # else it was aborted meanwhile
                        stream.put(output)
                if made.stats is not None:
                    self.stats = made.stats
                    if self.on_stats is not None:
                        self.on_stats(made.stats)
        except EngineError as error:
            logger.error("%s", error)
            self._die(str(error))
        except Exception:  # whatever it is: without a reader no request would ever end
            logger.exception("the engine's messages cannot be read")
            self._die("the engine's messages cannot be read")

    def _die(self, reason: str) -> None:
        self._dead.set_result(reason)
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        self._gone = self._gone or reason
        for stream in self._streams.values():
            stream.fail(StageUnavailableError(self.config.where, reason))


def _check_model(config: EngineConfig) -> None:
    """What this process reads of the model's folder, read once before the engine loads its weights: a file that is
    absent or broken is named at once. Raises ConfigError."""
    VisionGrid.from_model(Path(config.model))
    if config.ec_role.consumes:
        PromptProcessor(config.model, max_model_len=1, max_images=0)


def _look_at(image: bytes) -> tuple[ImageHeader, bytes]:
    return read_header(image), content_hash(image)


def _unique(request_id: str) -> str:
    """An id that no other request in the engine has, whatever the caller's was."""
    return f"{request_id[:64]}-{uuid.uuid4().hex[:8]}"


def _error(output: EngineCoreOutput, where: str) -> Exception:
    match output.error_kind:
        case ErrorKind.INVALID_REQUEST:
            return InvalidRequestError(output.error)
        case ErrorKind.INCOMPATIBLE:
            return IncompatibleError.from_message(output.error)
        case ErrorKind.OVERLOADED:
            return OverloadedError(f"{where}: {output.error}", retry_after_s=output.retry_after_s)
        case ErrorKind.UNAVAILABLE:
            return StageUnavailableError(where, output.error)
        case _:
            return EngineError(output.error)
