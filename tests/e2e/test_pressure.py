"""Thirty-two requests with pictures over a decode worker with half the KV blocks that they need: preempted requests
are recomputed from the encoder cache, and where the items have gone from there the router has them encoded again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.cluster import LocalCluster
from tests.e2e.conftest import TIMEOUT_S, Cluster, chat_request
from tests.failure_watch import failures, injected_faults
from tests.pictures import picture
from tests.reference import Conversation

NUM_REQUESTS = 32
NUM_TOKENS = 64
BLOCK_SIZE = 16
PICTURES = [picture(800 + i, 96, 64) for i in range(8)]
LOAD: list[Conversation] = [
    [("user", [PICTURES[i % 8], f"Number {i}: what is this?", PICTURES[(i + 3) % 8]])] for i in range(NUM_REQUESTS)
]
#: Of the decode worker. What it counts under pressure and no more, as long as nothing vanishes.
PRESSURE = {"num_preemptions_total", "kv_recomputations_total"}


class Answers:
    """All requests at once, read side by side."""

    def __init__(self, there: Cluster) -> None:
        self._there = there
        self._changed = threading.Condition()
        self.tokens: list[list[int]] = [[] for _ in LOAD]

    def read(self, when_all_have_begun: Callable[[], None] = lambda: None) -> list[list[int]]:
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            reading = [pool.submit(self._read, i) for i in range(NUM_REQUESTS)]
            with self._changed:
                assert self._changed.wait_for(lambda: all(self.tokens), TIMEOUT_S), "requests hang"
            when_all_have_begun()
            for each in reading:
                each.result()
        return self.tokens

    def _read(self, number: int) -> None:
        request = chat_request(LOAD[number], max_tokens=NUM_TOKENS)
        for response in self._there.router.Generate(request, timeout=TIMEOUT_S):
            with self._changed:
                self.tokens[number].extend(response.token_ids)
                self._changed.notify()


@pytest.fixture(scope="module")
def unpressed(cluster: Cluster) -> list[list[int]]:
    answers = Answers(cluster).read()
    assert len({tuple(answer) for answer in answers}) > NUM_REQUESTS // 2, "answers hardly depend on the pictures"
    cluster.assert_no_failures()
    return answers


@pytest.fixture(scope="module")
def half_the_blocks(cluster: Cluster) -> int:
    usages = [cluster.generate(chat_request(each, max_tokens=1))[-1].finished.usage for each in LOAD]
    return sum(-(-(usage.prompt_tokens + NUM_TOKENS) // BLOCK_SIZE) for usage in usages) // 2


@pytest.fixture(params=["ECSharedStorageConnector", "ECPeerConnector"])
def pressed(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path, half_the_blocks: int
) -> Iterator[tuple[Cluster, Path]]:
    """The cluster, and the folder of its items where there is one."""
    store = tmp_path / "ec"
    extra = f'{{"shared_storage_path": "{store}"}}' if request.param == "ECSharedStorageConnector" else "{}"
    local = LocalCluster(
        tiny_model,
        service_args=[
            "--dtype=float32",
            "--max-model-len=512",
            f"--ec-connector={request.param}",
            f"--block-size={BLOCK_SIZE}",
            f"--ec-connector-extra-config={extra}",
            # What the store lost once is kept for consumers too, who may never come for it.
            "--drain-timeout=2",
        ],
        prefill_args=[f"--max-num-seqs={NUM_REQUESTS}"],
        decode_args=[
            f"--max-num-seqs={NUM_REQUESTS}",
            f"--num-gpu-blocks={half_the_blocks}",
            "--no-enable-prefix-caching",
            "--encoder-cache-bytes=12288",
        ],
        log_dir=tmp_path / "logs",
    )
    with injected_faults(), local:
        yield Cluster(local), store


def counted(there: Cluster, stage: str) -> dict[str, int]:
    return failures(there.load(stage).counters)


def test_preempted_requests_are_recomputed_from_the_encoder_cache(
    pressed: tuple[Cluster, Path], unpressed: list[list[int]]
) -> None:
    """Nothing is encoded twice and nothing fails: where the items are is known to decode before it needs them."""
    there, store = pressed
    assert Answers(there).read() == unpressed
    assert counted(there, "decode").keys() == PRESSURE
    assert there.counter("decode", "ec_hits_total") > 0
    assert [counted(there, stage) for stage in ("encoder", "prefill", "router")] == [{}, {}, {}]
    assert there.counter("encoder", "vision_tower_images_total") == len(PICTURES)
    there.wait_empty()
    if not store.exists():
        return

    # Again, and the items vanish once every request has its first token, when only decode may still need them.
    evicted = itertools.count()

    def evict() -> None:
        for file in store.rglob("*.safetensors"):
            file.unlink()
            next(evicted)

    preempted = there.counter("decode", "num_preemptions_total")
    assert Answers(there).read(evict) == unpressed
    assert next(evicted) == len(PICTURES)
    assert there.counter("decode", "num_preemptions_total") > preempted
    again = there.load("router").counters['router_retries_total{stage="encode",reason="missing"}']
    assert again > 0
    assert there.counter("decode", "ec_misses_total") > 0
    there.wait_empty()
