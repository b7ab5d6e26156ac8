"""LLM: an engine in this process, for offline batches and for tests that want no other process.

It imports torch where it is used. Images are encoded into the connector's store first, then the prompts are generated,
all in one continuous batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec
from tqdm import tqdm

from core.config import EngineConfig
from core.errors import ConfigError, EngineError
from core.images import read_header
from core.keys import content_hash, item_key
from core.types import ECRole, Feature, SamplingParams
from core.vision_grid import VisionGrid
from engine.inproc_client import InprocClient
from engine.prompts import ChatMessage, PromptProcessor
from engine.protocol import EngineCoreOutput, EngineCoreRequest, RequestOutput


class LLM:
    """Generates for a list of conversations. The configuration's role must be `ec_both`."""

    def __init__(self, config: EngineConfig) -> None:
        if config.ec_role is not ECRole.BOTH:
            raise ConfigError("--ec-role", config.ec_role, f"offline generation needs {ECRole.BOTH}")
        self._grid = VisionGrid.from_model(config.model)
        # A server refuses what it cannot take soon; here the whole batch is meant to wait.
        self._client = InprocClient(msgspec.structs.replace(config, max_waiting=sys.maxsize))
        self._info = self._client.info
        try:
            self._prompts = PromptProcessor(
                config.model, max_model_len=self._info.max_model_len, max_images=config.max_images_per_prompt
            )
        except ConfigError:
            self.close()
            raise

    def generate(
        self,
        conversations: Sequence[Sequence[ChatMessage]],
        images: Sequence[Sequence[bytes]],
        sampling: SamplingParams,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """One output a conversation, in order. `images[i]` fill the image parts of conversation i, in order."""
        features = [[self._encode_request(image) for image in group] for group in images]
        distinct = {request.feature.key: request for group in features for request in group if request.feature}
        self._run(list(distinct.values()), "encode", progress)
        requests = []
        for i, (messages, group) in enumerate(zip(conversations, features, strict=True)):
            token_ids, placed = self._prompts.process_chat(
                messages, [request.feature for request in group if request.feature is not None]
            )
            requests.append(
                EngineCoreRequest(
                    f"generate-{i}",
                    time.time(),
                    prompt_token_ids=token_ids,
                    features=placed,
                    sampling=sampling,
                    eos_token_ids=list(self._prompts.eos_token_ids),
                )
            )
        ended = self._run(requests, "generate", progress)
        return [self._output(output, sampling) for output in ended]

    def close(self) -> None:
        self._client.close()

    def _encode_request(self, image: bytes) -> EngineCoreRequest:
        header = read_header(image)
        grid, num_embeds = self._grid.predict(header.width, header.height)
        key = item_key(content_hash(image), self._info.namespace_digest)
        feature = Feature(key, num_embeds, grid, self._info.embed_width)
        return EngineCoreRequest(f"encode-{key[:16]}", time.time(), image=image, feature=feature)

    def _run(self, requests: Sequence[EngineCoreRequest], what: str, progress: bool) -> list[EngineCoreOutput]:
        """Add all, step until all have ended; the last output of each, with all of its tokens. Where one fails, the
        others are dropped."""
        ended: dict[str, EngineCoreOutput] = {}
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self._client.add(request)
            with tqdm(total=len(requests), desc=what, disable=not progress) as bar:
                while len(ended) < len(requests):
                    for output in self._client.step():
                        if output.error_kind is not None or output.missing:
                            raise EngineError(f"{output.request_id}: {output.error or 'images are missing'}")
                        tokens[output.request_id] += output.new_token_ids
                        if output.finished:
                            output.new_token_ids = tokens[output.request_id]
                            ended[output.request_id] = output
                            bar.update()
        except BaseException:
            for request in requests:
                self._client.abort(request.request_id)
            raise
        return [ended[request.request_id] for request in requests]

    def _output(self, output: EngineCoreOutput, sampling: SamplingParams) -> RequestOutput:
        text = self._prompts.tokenizer.decode(output.new_token_ids, skip_special_tokens=sampling.skip_special_tokens)
        return RequestOutput(
            request_id=output.request_id,
            token_ids=output.new_token_ids,
            text=text,
            finished=True,
            finish_reason=output.finish_reason,
            spans=output.spans,
            usage=output.usage,
        )
