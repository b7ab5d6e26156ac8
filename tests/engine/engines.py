"""Small engines in this process, and requests for them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core.config import ConnectorConfig, EngineConfig
from core.images import read_header
from core.keys import content_hash, item_key
from core.types import ECRole, Feature, PlacedFeature, SamplingParams
from core.vision_grid import VisionGrid
from engine.inproc_client import InprocClient
from engine.protocol import EngineCoreOutput, EngineCoreRequest

IMAGE_TOKEN = 7  # any id: its embedding is replaced
DEADLINE_S = 30.0


def engine_config(model: Path, store: Path, role: ECRole = ECRole.BOTH, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        **changes,
    }
    connector = ConnectorConfig("ECSharedStorageConnector", extra={"shared_storage_path": str(store)})
    return EngineConfig(model=str(model), ec_role=role, ec_connector=connector, **values)


def peer(**extra: Any) -> ConnectorConfig:
    return ConnectorConfig("KVPeerConnector", extra=extra)


class Engine:
    """An InprocClient, and what it has told so far."""

    def __init__(self, config: EngineConfig) -> None:
        self.client = InprocClient(config)
        self.grid = VisionGrid.from_model(config.model)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}

    def feature(self, image: bytes) -> Feature:
        header = read_header(image)
        grid, num_embeds = self.grid.predict(header.width, header.height)
        info = self.client.info
        return Feature(item_key(content_hash(image), info.namespace_digest), num_embeds, grid, info.embed_width)

    def encode(self, name: str, image: bytes) -> None:
        self.client.add(EngineCoreRequest(name, time.time(), image=image, feature=self.feature(image)))

    def add(self, name: str, parts: Sequence[int | bytes], sampling: SamplingParams, **more: Any) -> None:
        """A prompt of `parts`: a number of random tokens (the same for the same name), or an image."""
        draw = random.Random(name.partition("@")[0])
        tokens: list[int] = []
        placed: list[PlacedFeature] = []
        for part in parts:
            if isinstance(part, int):
                tokens += [draw.randrange(20, 900) for _ in range(part)]
            else:
                feature = self.feature(part)
                placed.append(PlacedFeature(feature, len(tokens)))
                tokens += [IMAGE_TOKEN] * feature.num_embeds
        self.client.add(
            EngineCoreRequest(name, time.time(), prompt_token_ids=tokens, features=placed, sampling=sampling, **more)
        )

    def step(self) -> None:
        for output in self.client.step():
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                self.ended[output.request_id] = output

    def run_until(self, condition: Callable[[], bool], *others: Engine) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, "it does not come to an end"
            for engine in (self, *others):
                engine.step()

    def run(self, *names: str) -> None:
        """Step until these have ended."""
        self.run_until(lambda: all(name in self.ended for name in names))

    def assert_empty(self) -> None:
        """After what goes on in the background: no request, block, lease or item is held."""
        self.run_until(lambda: not self.client.core.has_work)
        stats = self.client.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_held, stats.kv_leases) == (0, 0, 0, 0)
        assert stats.encoder_cache_bytes_held == 0

    def counter(self, name: str) -> int:
        return self.client.stats().counters[name]
