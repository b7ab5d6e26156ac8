"""Half the KV blocks that the load needs, and room for three of eight pictures: the answers of an engine with room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.types import SamplingParams
from tests.engine.engines import Engine, engine_config
from tests.failure_watch import failures
from tests.pictures import picture

NUM_REQUESTS = 32
BLOCK_SIZE = 8
PICTURES = [picture(700 + i, 96, 64) for i in range(8)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
#: Each begins in its own way, so that no block is shared.
LOAD: dict[str, list[int | bytes]] = {
    f"p{i}": [4 + i % 7, PICTURES[i % 8], 3 + i % 5, PICTURES[(i + 3) % 8], 2] for i in range(NUM_REQUESTS)
}


@pytest.fixture(scope="module")
def roomy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(engine_config(tiny_model, tmp_path_factory.mktemp("roomy"), max_num_seqs=NUM_REQUESTS))
    run_load(engine)
    yield engine
    engine.client.close()


def run_load(engine: Engine) -> None:
    for i, image in enumerate(PICTURES):
        engine.encode(f"e{i}", image)
    engine.run(*(f"e{i}" for i in range(len(PICTURES))))
    for name, parts in LOAD.items():
        engine.add(name, parts, SAMPLING)
    engine.run(*LOAD)
    engine.assert_empty()


@pytest.mark.faults("too few KV blocks")
@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "steps ahead"])
def test_half_the_blocks_give_the_same_answers(tiny_model: Path, tmp_path: Path, roomy: Engine, ahead: bool) -> None:
    num_embeds = roomy.feature(PICTURES[0]).num_embeds
    needed = sum(
        -(-(sum(part if isinstance(part, int) else num_embeds for part in parts) + 24) // BLOCK_SIZE)
        for parts in LOAD.values()
    )
    pressed: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks": needed // 2,
        "encoder_cache_bytes": 3 * num_embeds * roomy.client.info.embed_width * 4,
        "max_num_seqs": NUM_REQUESTS,
        "async_scheduling": ahead,
    }
    engine = Engine(engine_config(tiny_model, tmp_path, **pressed))
    try:
        run_load(engine)
        assert {name: engine.tokens[name] for name in LOAD} == {name: roomy.tokens[name] for name in LOAD}
        preempted = engine.counter("num_preemptions_total")
        assert preempted > 0
        recomputed = engine.counter("kv_recomputations_total")
        assert 0 < recomputed <= preempted
        wrong = failures(engine.client.stats().counters)
        assert wrong == {"num_preemptions_total": preempted, "kv_recomputations_total": recomputed}
        assert engine.counter("ec_misses_total") == engine.counter("vision_tower_images_total") == len(PICTURES)
        assert engine.counter("ec_hits_total") > len(PICTURES), "pictures are loaded again for what is computed again"
    finally:
        engine.client.close()
