"""Steps scheduled while others run: the same tokens, nothing left behind, and no spinning."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from core.config import ConnectorConfig
from core.types import ECRole, FinishReason, KVRole, SamplingParams
from tests.engine import gated_connector
from tests.engine.engines import Engine, engine_config, peer
from tests.failure_watch import injected_faults
from tests.pictures import picture

IMAGES = [picture(1, 96, 64), picture(2, 64, 96), picture(3, 64, 64)]
NUM_TURNS = 60
FAILURES = ("ec_load_failures_total", "ec_save_failures_total", "kv_transfer_failures_total")


class Call(NamedTuple):
    """A request of the mix: when it comes, and when it is aborted, in turns."""

    name: str
    parts: list[int | bytes]
    sampling: SamplingParams
    stop: list[int]
    comes: int
    aborted: int | None


@pytest.fixture(scope="module")
def store(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def plain(tiny_model: Path, store: Path) -> Iterator[Engine]:
    """One step at a time, with room for everything; all pictures are in its store."""
    engine = Engine(engine_config(tiny_model, store, async_scheduling=False))
    for i, image in enumerate(IMAGES):
        engine.encode(f"e{i}", image)
    engine.run(*(f"e{i}" for i in range(len(IMAGES))))
    yield engine
    engine.client.close()


def make_mix(seed: int, plain: Engine) -> list[Call]:
    """Text and pictures, prompts in common, greedy and seeded, answers that end at a token, aborts at any time."""
    draw = random.Random(seed)
    calls = []
    for i in range(14):
        parts: list[int | bytes] = [draw.randint(1, 40)]
        for _ in range(draw.randrange(3)):
            parts += [draw.choice(IMAGES), draw.randint(1, 12)]
        sampling = SamplingParams(temperature=0.0, max_tokens=draw.randint(1, 24))
        if draw.random() < 0.5:
            sampling = msgspec.structs.replace(sampling, temperature=1.0, top_p=0.9, seed=draw.randrange(1000))
        # The text before the @ seeds the prompt: some requests begin alike.
        name = f"{draw.choice('abcd')}@{seed}-{i}"
        plain.add(f"{name}-free", parts, msgspec.structs.replace(sampling, ignore_eos=True))
        plain.run(f"{name}-free")
        free = plain.tokens[f"{name}-free"]
        stop = [draw.choice(free)] if draw.random() < 0.6 else []
        aborted = draw.randrange(NUM_TURNS) if draw.random() < 0.3 else None
        calls.append(Call(name, parts, sampling, stop, draw.randrange(NUM_TURNS // 2), aborted))
    return calls


def make_crowd() -> list[Call]:
    """All at once and nothing in common, three times the blocks that the pressed engines have: how quick they are
    does not matter."""
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return [Call(f"{'pqrstuvw'[i]}@crowd", [30 + i], sampling, [], 0, None) for i in range(8)]


def run_mix(engine: Engine, mix: list[Call]) -> int:
    """Most steps that were in flight at once."""
    most = 0
    for turn in range(NUM_TURNS):
        for call in mix:
            if call.comes == turn:
                engine.add(call.name, call.parts, call.sampling, eos_token_ids=call.stop)
            if call.aborted == turn:
                engine.client.abort(call.name)
        engine.step()
        most = max(most, len(engine.client.core._in_flight))
    engine.run(*(call.name for call in mix if call.aborted is None))
    engine.assert_empty()
    return most


def assert_same(engine: Engine, plain: Engine, mix: list[Call]) -> None:
    for call in mix:
        if call.aborted is None:
            ours, theirs = engine.ended[call.name], plain.ended[call.name]
            assert engine.tokens[call.name] == plain.tokens[call.name], call
            assert ours.finish_reason is theirs.finish_reason
            assert ours.usage is not None
            assert theirs.usage is not None
            assert ours.usage.completion_tokens == theirs.usage.completion_tokens == len(plain.tokens[call.name])


@pytest.fixture(scope="module")
def mixes(plain: Engine) -> list[list[Call]]:
    """Three mixes and a crowd, which `plain` has run."""
    made = [*(make_mix(seed, plain) for seed in range(3)), make_crowd()]
    assert [run_mix(plain, mix) <= 1 for mix in made] == [True] * 4
    ended = [plain.ended[call.name] for mix in made for call in mix if call.aborted is None]
    assert {output.finish_reason for output in ended} == {FinishReason.STOP, FinishReason.LENGTH}
    return made


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_the_same_tokens_with_steps_in_flight(
    tiny_model: Path,
    store: Path,
    plain: Engine,
    mixes: list[list[Call]],
    backend: str,
    request: pytest.FixtureRequest,
) -> None:
    pressed: dict[str, Any] = {"max_model_len": 160, "block_size": 8, "num_gpu_blocks": 21}
    ahead = {"async_scheduling": True, "distributed_executor_backend": backend}
    with injected_faults():
        engines = [Engine(engine_config(tiny_model, store, **ahead, **pressed))]
    request.addfinalizer(lambda: [engine.client.close() for engine in engines])
    if backend == "uni":
        engines.append(Engine(engine_config(tiny_model, store, **ahead)))
    for mix in mixes:
        for engine in engines:
            assert run_mix(engine, mix) == 2, "nothing was scheduled ahead"
            assert_same(engine, plain, mix)
    assert engines[0].counter("num_preemptions_total") > 0
    for engine in (plain, *engines):
        assert [engine.counter(name) for name in FAILURES] == [0, 0, 0]
    if backend == "uni":
        assert engines[1].counter("kv_recomputations_total") == engines[1].counter("num_preemptions_total") == 0
        assert engines[1].client.core.executor.worker.runner._batch._row_of == {}  # type: ignore[attr-defined]


def test_the_same_tokens_over_a_hand_over(tiny_model: Path, store: Path, plain: Engine) -> None:
    """Prefill never computes the token after the one that it hands over; decode pulls while it runs others."""
    names = [f"{'hij'[i % 3]}@{i}" for i in range(9)]
    parts: dict[str, list[int | bytes]] = {name: [5 + 7 * i, IMAGES[i % 3], 3] for i, name in enumerate(names)}
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
    for name in names:
        plain.add(name, parts[name], sampling)
    plain.run(*names)
    prefill, decode = (
        Engine(
            engine_config(tiny_model, store, ECRole.CONSUMER, kv_role=role, kv_connector=peer(), async_scheduling=True)
        )
        for role in (KVRole.PRODUCER, KVRole.CONSUMER)
    )
    try:
        for name in names:
            prefill.add(name, parts[name], sampling, hand_over=True)
        moved: set[str] = set()

        def move() -> bool:
            for name in names:
                if name in prefill.ended and name not in moved:
                    moved.add(name)
                    first, handle = prefill.tokens[name], prefill.ended[name].kv
                    decode.add(name, parts[name], sampling, kv=handle, output_token_ids=first)
            return len(moved) == len(names) and all(name in decode.ended for name in names)

        decode.run_until(move, prefill)
        assert {n: prefill.tokens[n] + decode.tokens[n] for n in names} == {n: plain.tokens[n] for n in names}
        for engine in (prefill, decode):
            engine.assert_empty()
            assert [engine.counter(name) for name in FAILURES] == [0, 0, 0]
            assert engine.counter("kv_recomputations_total") == engine.counter("num_preemptions_total") == 0
        assert prefill.counter("generation_tokens_total") == len(names)
    finally:
        prefill.client.close()
        decode.client.close()


@pytest.fixture
def gated(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    """Its steps run only while the gate is open."""
    connector = ConnectorConfig("GatedConnector", "tests.engine.gated_connector", {"fail": False})
    config = engine_config(tiny_model, tmp_path, async_scheduling=True)
    engine = Engine(msgspec.structs.replace(config, ec_connector=connector))
    gated_connector.GATE.clear()
    yield engine
    gated_connector.GATE.set()
    engine.client.close()


def test_an_engine_whose_steps_run_does_not_spin(gated: Engine) -> None:
    core = gated.client.core
    assert core.wait_s() is None
    gated.add("r", [9], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert core.wait_s() == 0.0
    assert core.step() == core.step() == []
    assert len(core._in_flight) == 2, "the second is scheduled while the first runs"
    gated.add("s", [4], SamplingParams(temperature=0.0, max_tokens=1))
    wait_s = core.wait_s()
    assert wait_s is not None
    assert wait_s > 1.0, "there is room for no third, and nothing to poll for"
    begun_s = core._begun_s
    assert core.step() == []
    assert core._begun_s == begun_s
    gated_connector.GATE.set()
    gated.run("r", "s")
    assert len(gated.tokens["r"]) == 6
    gated.assert_empty()
    assert core.wait_s() is None


def test_an_abort_while_its_steps_run_frees_everything(gated: Engine) -> None:
    core = gated.client.core
    for name in ("a", "b"):
        gated.add(name, [20], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    core.step()
    core.step()
    gated.client.abort("a")
    gated_connector.GATE.set()
    gated.run("b")
    assert len(gated.tokens["b"]) == 8
    assert "a" not in gated.tokens
    gated.assert_empty()


def test_the_log_names_the_requests_of_a_step_that_fails(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector = ConnectorConfig("GatedConnector", "tests.engine.gated_connector", {"fail": True})
    config = engine_config(tiny_model, tmp_path, async_scheduling=True)
    engine = Engine(msgspec.structs.replace(config, ec_connector=connector))
    try:
        engine.add("the-one", [9], SamplingParams(max_tokens=2))
        with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="fault of the connector"):
            engine.run("the-one")
        assert "a step failed; its requests and items: the-one" in caplog.text
    finally:
        engine.client.close()
