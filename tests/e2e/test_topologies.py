"""Other shapes than one of each: everything in one process, and several workers a stage of which some die."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cli.cluster import LocalCluster
from cli.process import Child
from protos import common_pb2, router_pb2_grpc
from tests.e2e.conftest import Cluster, chat_request
from tests.e2e.conversations import CONVERSATIONS
from tests.failure_watch import injected_faults
from tests.pictures import picture
from tests.reference import Conversation, Reference

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 120.0


def test_all_in_one(tiny_model: Path, tmp_path: Path, reference: Reference) -> None:
    """One process with every role serves all three stages; the router does not know the difference."""
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    worker = Child(
        "all",
        [
            *(sys.executable, "-m", "services.prefill", "serve", "--model", str(tiny_model), "--dtype=float32"),
            *("--ec-role=ec_both", "--kv-role=kv_both", "--port=0", "--metrics-port=0", "--max-model-len=1024"),
            f'--ec-connector-extra-config={{"shared_storage_path": "{tmp_path / "ec"}"}}',
        ],
        env=env,
        log_path=tmp_path / "all.log",
    )
    router: Child | None = None
    conversation = CONVERSATIONS["images around text"]
    try:
        worker.start()
        assert worker.wait_ready(time.monotonic() + _START_S), worker.tail()
        lists = [f"--{stage}={worker.grpc}" for stage in ("encoder", "prefill", "decode")]
        argv = [sys.executable, "-m", "router", "serve", *lists, "--port=0", "--http-port=0"]
        router = Child("router", argv, env=env, log_path=tmp_path / "router.log")
        router.start()
        assert router.wait_ready(time.monotonic() + _START_S), router.tail()
        with grpc.insecure_channel(router.grpc) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            answer = [
                t for r in stub.Generate(chat_request(conversation, max_tokens=16), timeout=60) for t in r.token_ids
            ]
        assert answer == reference.generate(conversation, 16)
    finally:
        for child in (router, worker):
            if child is not None:
                child.terminate()
                child.wait_ended(time.monotonic() + 20)


@pytest.fixture(scope="module")
def wide(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """Two encoders, one prefill, two decodes, and the folder of their encoder cache."""
    folder = tmp_path_factory.mktemp("wide")
    local = LocalCluster(
        tiny_model,
        encoders=2,
        decodes=2,
        service_args=[
            "--dtype=float32",
            "--max-model-len=1024",
            f'--ec-connector-extra-config={{"shared_storage_path": "{folder / "ec"}"}}',
        ],
        log_dir=folder / "logs",
    )
    with injected_faults(), local:
        yield Cluster(local), folder / "ec"


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_more_workers_answer_like_one_of_each_from_the_first_request_on(
    wide: tuple[Cluster, Path], reference: Reference, name: str
) -> None:
    """One of each is held against the same reference in test_equality.py. Nothing ran before these."""
    cluster, _ = wide
    assert cluster.tokens(CONVERSATIONS[name], max_tokens=16) == reference.generate(CONVERSATIONS[name], 16)


def test_images_spread_over_encoders_and_equal_ones_meet(wide: tuple[Cluster, Path]) -> None:
    cluster, _ = wide
    before = [_counter(cluster, "encoder", i, "vision_tower_images_total") for i in range(2)]
    for _ in range(2):
        for seed in range(12):
            cluster.tokens([("user", [picture(200 + seed, 64, 64), "?"])], max_tokens=1)
    ran = [_counter(cluster, "encoder", i, "vision_tower_images_total") - before[i] for i in range(2)]
    assert sum(ran) == 12
    assert min(ran) > 0


def test_a_damaged_item_is_encoded_again(wide: tuple[Cluster, Path], reference: Reference) -> None:
    cluster, store = wide
    conversation: Conversation = [("user", [picture(230, 96, 64), "Gone?"])]
    expected = reference.generate(conversation, 8)
    assert cluster.tokens(conversation, max_tokens=8) == expected
    for file in store.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    cluster.local.restart("prefill", 0)  # with an empty buffer, so that it must load
    cluster.wait_serving([("user", ["Are you there?"])])
    assert cluster.tokens(conversation, max_tokens=8) == expected
    assert _counter(cluster, "prefill", 0, "ec_load_failures_total") == 1
    assert any("retries" in name and n for name, n in cluster.load("router").counters.items())
    cluster.wait_empty()


def test_a_decode_worker_that_dies_in_mid_stream_is_not_noticed(
    wide: tuple[Cluster, Path], reference: Reference
) -> None:
    cluster, _ = wide
    conversation = CONVERSATIONS["one image"]
    num_tokens = 150
    expected = reference.generate(conversation, num_tokens)
    stream = cluster.router.Generate(chat_request(conversation, max_tokens=num_tokens), timeout=60)
    tokens: list[int] = []
    killed = False
    for response in stream:
        tokens += response.token_ids
        if len(tokens) > 10 and not killed:
            busy = [i for i in range(2) if _load(cluster, "decode", i)]
            if busy:
                os.kill(cluster.local.workers["decode"][busy[0]].process.pid, signal.SIGKILL)
                killed = True
    assert killed
    assert tokens == expected
    cluster.local.restart("decode", busy[0])


def test_a_dead_encoder_is_replaced_by_the_other(wide: tuple[Cluster, Path], reference: Reference) -> None:
    cluster, _ = wide
    os.kill(cluster.local.workers["encoder"][0].process.pid, signal.SIGKILL)
    for seed in range(6):
        conversation: Conversation = [("user", [picture(240 + seed, 64, 96), "?"])]
        assert cluster.tokens(conversation, max_tokens=4) == reference.generate(conversation, 4)


def _counter(cluster: Cluster, stage: str, index: int, name: str) -> int:
    load = cluster.ask(stage, "GetLoad", common_pb2.GetLoadRequest(), index)
    assert isinstance(load, common_pb2.Load)
    return int(load.counters[name])


def _load(cluster: Cluster, stage: str, index: int) -> int:
    load = cluster.ask(stage, "GetLoad", common_pb2.GetLoadRequest(), index)
    assert isinstance(load, common_pb2.Load)
    return int(load.num_requests_running + load.num_requests_waiting)
