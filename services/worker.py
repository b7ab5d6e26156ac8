"""What a servicer sees of the process around it: the engine once it is there, and what the worker says of itself.

Everything here runs on the gRPC server's event loop. No torch: the engine is a client of the engine's own process.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import grpc

from core.config import EngineConfig
from core.convert import load_to_proto, vision_rule_to_proto
from core.errors import EngineError, InvalidRequestError, StageUnavailableError
from core.options import ServeSettings
from core.server import guarded
from core.types import Feature, PlacedFeature, Stage
from core.version import version
from core.vision_grid import VisionGrid
from engine.protocol import EncodeOutput, EngineCoreRequest, EngineInfo, EngineStats, RequestOutput
from protos import common_pb2

# An engine's death and the errors that it causes reach us in no certain order.
_DEATH_NOTICE_S = 0.2

#: A chat turn as `Prompts` takes it: role, then ("text", text) and ("image", None) in order.
Turn = tuple[str, list[tuple[str, str | None]]]


class Prompts(Protocol):
    """`engine.prompts.PromptProcessor`. Raises InvalidRequestError for a prompt that can never be computed."""

    vocab_size: int

    def process_chat(
        self, messages: Sequence[Turn], features: list[Feature]
    ) -> tuple[list[int], list[PlacedFeature]]: ...

    def process_tokens(
        self, token_ids: list[int], features: list[Feature]
    ) -> tuple[list[int], list[PlacedFeature]]: ...


class Engine(Protocol):
    """`engine.async_llm.AsyncLLM`, as far as services use it. See there for what each does."""

    info: EngineInfo
    stats: EngineStats
    vision_grid: VisionGrid | None
    on_stats: Callable[[EngineStats], None] | None

    @property
    def prompts(self) -> Prompts | None: ...
    async def wait_failed(self) -> str: ...
    async def encode(
        self, request_id: str, image: bytes, *, tenant: str = "", reported_missing: bool = False
    ) -> EncodeOutput: ...
    def generate(self, request: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None]: ...
    async def release(self, request_id: str) -> None: ...
    async def shutdown(self) -> None: ...


class Worker:
    """One process: its stage, its settings, and its engine from `attach` until `fail`."""

    def __init__(self, stage: Stage, config: EngineConfig, settings: ServeSettings) -> None:
        self.stage = stage
        self.config = config
        self.settings = settings
        self.instance_id = str(uuid.uuid4())
        self._engine: Engine | None = None
        self._failed = asyncio.Event()
        self._reason = "it is still starting"

    def attach(self, engine: Engine) -> None:
        """The engine serves from now on."""
        self._engine = engine

    def fail(self, reason: str) -> None:
        """The engine is dead: every call from now on, and those in flight, are UNAVAILABLE."""
        self._engine = None
        self._reason = reason
        self._failed.set()

    @property
    def engine(self) -> Engine:
        """Raises StageUnavailableError before the engine is ready and once it is dead."""
        if self._engine is None:
            raise StageUnavailableError(self.stage, self._reason)
        return self._engine

    def guarded(
        self, context: grpc.aio.ServicerContext[Any, Any], what: str
    ) -> AbstractAsyncContextManager[None, None]:
        """`async with worker.guarded(context, "Decode"):` around a handler's body: errors become statuses."""
        return guarded(context, what, self._explain)

    async def _explain(self, error: Exception) -> Exception:
        # A fault in one request is INTERNAL; but what failed because the whole engine is gone may be tried on another
        # worker, which INTERNAL does not say.
        if not isinstance(error, EngineError):
            return error
        try:
            await asyncio.wait_for(self._failed.wait(), _DEATH_NOTICE_S)
        except TimeoutError:
            return error
        return StageUnavailableError(self.stage, self._reason)

    def server_info(self, stage: Stage) -> common_pb2.ServerInfo:
        """What GetServerInfo of `stage`'s service answers. Raises StageUnavailableError before the engine is ready."""
        info, config, grid = self.engine.info, self.config, self.engine.vision_grid
        return common_pb2.ServerInfo(
            version=version(),
            stage=stage.value,
            instance_id=self.instance_id,
            model=self.settings.model,
            family=info.family,
            namespace_digest=info.namespace_digest,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            embed_width=info.embed_width,
            ec_role=config.ec_role.value,
            kv_role=config.kv_role.value if config.kv_role is not None else "",
            ec_connector=config.ec_connector.name,
            kv_connector=config.kv_connector.name if config.kv_connector is not None else "",
            kv_layout=info.kv_layout,
            weights_loaded_bytes=info.weights_loaded_bytes,
            weights_skipped_bytes=info.weights_skipped_bytes,
            max_images_per_prompt=config.max_images_per_prompt,
            engine_pid=info.pid,
            vision_rule=vision_rule_to_proto(grid) if grid is not None else None,
            kv_block_size=config.block_size if config.kv_role is not None else 0,
        )

    def load(self) -> common_pb2.Load:
        """What GetLoad answers. Raises StageUnavailableError before the engine is ready."""
        return load_to_proto(self.engine.stats)


def check_num_images(num_images: int, max_images: int) -> None:
    """Raises InvalidRequestError for a prompt with more images than `--limit-mm-per-prompt` allows."""
    if num_images > max_images:
        raise InvalidRequestError(f"the prompt has {num_images} images, more than {max_images}")


def check_expanded(
    engine: Engine,
    prompt_token_ids: list[int],
    features: list[PlacedFeature],
    output_token_ids: list[int],
    max_images: int,
) -> None:
    """Raises InvalidRequestError for an expanded prompt that is empty, whose features reach beyond it, or that holds a
    token outside the vocabulary: a look-up with such a token would end the engine, not the request."""
    if not prompt_token_ids:
        raise InvalidRequestError("prompt_token_ids is empty")
    check_num_images(len(features), max_images)
    if features and features[-1].end > len(prompt_token_ids):
        raise InvalidRequestError(
            f"the last feature ends at {features[-1].end}, beyond the prompt's {len(prompt_token_ids)} tokens"
        )
    if engine.prompts is None:
        raise EngineError("this engine has no prompt processor")
    for name, token_ids in (("prompt_token_ids", prompt_token_ids), ("output_token_ids", output_token_ids)):
        if token_ids and max(token_ids) >= engine.prompts.vocab_size:
            raise InvalidRequestError(
                f"{name} holds {max(token_ids)}; the vocabulary ends at {engine.prompts.vocab_size - 1}"
            )
