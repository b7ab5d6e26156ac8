"""EngineCore on a real checkpoint: sampling, pressure, hand-over, aborts, and requests that must not end it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core.types import ECRole, Feature, FinishReason, KVRole, PlacedFeature, SamplingParams
from engine.protocol import EngineCoreRequest, ErrorKind
from tests.engine.engines import Engine, engine_config, peer
from tests.failure_watch import injected_faults
from tests.pictures import picture

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PICTURE, OTHER = picture(1, 96, 64), picture(2, 64, 96)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def make_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeEngine]:
    store = tmp_path_factory.mktemp("store")
    made: list[Engine] = []

    def make(role: ECRole = ECRole.BOTH, **changes: Any) -> Engine:
        engine = Engine(engine_config(tiny_model, store, role, **changes))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.client.close()


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    """With both pictures in its store."""
    engine = make_engine()
    for i, image in enumerate((PICTURE, OTHER)):
        engine.encode(f"e{i}", image)
    engine.run("e0", "e1")
    return engine


def test_tokens_do_not_depend_on_who_else_is_in_the_batch(engine: Engine) -> None:
    """Greedy and seeded alike; and both pictures matter."""
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
    prompts: dict[str, list[int | bytes]] = {"a": [5, PICTURE, 70, OTHER, 3], "b": [1], "c": [40]}
    for name, parts in prompts.items():
        for kind, sampling in (("greedy", GREEDY), ("seeded", seeded)):
            engine.add(f"{name}@{kind}-alone", parts, sampling)
            engine.run(f"{name}@{kind}-alone")
    crowd = []
    for kind, sampling in (("seeded", seeded), ("greedy", GREEDY)):
        for name, parts in prompts.items():
            engine.add(f"{name}@{kind}-crowd", parts, sampling)
            engine.add(f"noise@{kind}-{name}", [30], SamplingParams(temperature=1.3, seed=len(crowd), max_tokens=6))
            crowd += [f"{name}@{kind}-crowd", f"noise@{kind}-{name}"]
    engine.run(*crowd)
    for name in prompts:
        for kind in ("greedy", "seeded"):
            assert engine.tokens[f"{name}@{kind}-crowd"] == engine.tokens[f"{name}@{kind}-alone"], (name, kind)
        assert engine.tokens[f"{name}@greedy-alone"] != engine.tokens[f"{name}@seeded-alone"]
    engine.add("a@swapped", [5, OTHER, 70, PICTURE, 3], GREEDY)
    engine.run("a@swapped")
    assert engine.tokens["a@swapped"] != engine.tokens["a@greedy-alone"]
    engine.assert_empty()


def test_without_a_seed_equal_prompts_get_different_answers(engine: Engine) -> None:
    sampling = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    for i in range(2):
        engine.add(f"u@{i}", [10], sampling)
    engine.run("u@0", "u@1")
    assert engine.tokens["u@0"] != engine.tokens["u@1"]


def test_how_answers_end(engine: Engine) -> None:
    engine.add("s@free", [9], GREEDY)
    engine.run("s@free")
    free = engine.tokens["s@free"]
    stop = free[3]
    at = free.index(stop)
    cases: dict[str, tuple[SamplingParams, list[int]]] = {
        "s@stop": (SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,)), []),
        "s@eos": (SamplingParams(temperature=0.0, max_tokens=12), [stop]),
        "s@ignored": (GREEDY, [stop]),
        "s@short": (SamplingParams(temperature=0.0, max_tokens=2), []),
        "s@minimum": (SamplingParams(temperature=0.0, max_tokens=12, min_tokens=at + 3, stop_token_ids=(stop,)), []),
    }
    for name, (sampling, eos) in cases.items():
        engine.add(name, [9], sampling, eos_token_ids=eos)
    engine.run(*cases)
    for name in ("s@stop", "s@eos"):
        assert engine.tokens[name] == free[: at + 1]
        assert engine.ended[name].finish_reason is FinishReason.STOP
    assert engine.tokens["s@ignored"] == free
    assert engine.tokens["s@short"] == free[:2]
    assert engine.ended["s@short"].finish_reason is FinishReason.LENGTH
    least = engine.tokens["s@minimum"]
    assert least[:at] == free[:at]
    assert stop not in least[: at + 3]
    assert len(least) >= at + 3


def test_the_answer_ends_where_the_model_does(engine: Engine) -> None:
    engine.add("full", [250], SamplingParams(temperature=0.0, ignore_eos=True))
    engine.run("full")
    assert len(engine.tokens["full"]) == 6
    assert engine.ended["full"].finish_reason is FinishReason.LENGTH


def test_preempted_requests_give_the_tokens_of_an_engine_with_room(make_engine: MakeEngine, engine: Engine) -> None:
    with injected_faults():
        pressed = make_engine(max_model_len=64, block_size=8, num_gpu_blocks=9)
    prompts: dict[str, list[int | bytes]] = {f"p{i}": [10 + i, PICTURE, 2] for i in range(4)}
    prompts |= {f"t{i}": [20 + i] for i in range(3)}
    for each in (engine, pressed):
        for name, parts in prompts.items():
            each.add(name, parts, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        each.run(*prompts)
        each.assert_empty()
    assert pressed.counter("num_preemptions_total") > 0
    assert engine.counter("num_preemptions_total") == 0
    assert {n: pressed.tokens[n] for n in prompts} == {n: engine.tokens[n] for n in prompts}


def test_a_prompt_computed_by_one_engine_goes_on_in_another(make_engine: MakeEngine, engine: Engine) -> None:
    prefill = make_engine(ECRole.CONSUMER, kv_role=KVRole.PRODUCER, kv_connector=peer())
    with injected_faults():  # at the end
        decode = make_engine(ECRole.CONSUMER, kv_role=KVRole.CONSUMER, kv_connector=peer())
    parts: list[int | bytes] = [20, PICTURE, 60, OTHER, 5]
    engine.add("h@one", parts, GREEDY)
    engine.run("h@one")

    prefill.add("h@two", parts, GREEDY, hand_over=True)
    prefill.run("h@two")
    first, handle = prefill.tokens["h@two"], prefill.ended["h@two"].kv
    assert handle is not None
    assert prefill.client.stats().kv_leases == 1
    decode.add("h@two", parts, GREEDY, kv=handle, output_token_ids=first)
    decode.run_until(lambda: "h@two" in decode.ended, prefill)
    assert first + decode.tokens["h@two"] == engine.tokens["h@one"]
    assert decode.counter("kv_transfer_bytes_total") > 0
    assert decode.counter("kv_recomputations_total") == decode.counter("ec_hits_total") == 0
    prefill.assert_empty()
    decode.assert_empty()

    # What cannot be: the wrong direction, and a lease that has ended already.
    decode.add("h@wrong", parts, GREEDY, hand_over=True)
    prefill.add("h@wrong", parts, GREEDY, kv=handle, output_token_ids=first)
    decode.add("h@again", parts, GREEDY, kv=handle, output_token_ids=first)
    decode.run_until(lambda: {"h@wrong", "h@again"} <= decode.ended.keys() and "h@wrong" in prefill.ended, prefill)
    assert decode.ended["h@wrong"].error_kind is prefill.ended["h@wrong"].error_kind is ErrorKind.INCOMPATIBLE
    assert first + decode.tokens["h@again"] == engine.tokens["h@one"], "recomputed, images and all"
    assert decode.counter("kv_recomputations_total") == 1
    prefill.assert_empty()
    decode.assert_empty()


def test_an_absent_item_is_named_and_the_engine_goes_on(engine: Engine) -> None:
    absent = picture(99, 64, 64)
    engine.add("m", [5, absent, 5, PICTURE, 1], GREEDY)
    engine.run("m")
    assert engine.ended["m"].missing == [engine.feature(absent).key]
    assert engine.ended["m"].error_kind is None
    engine.encode("m-encode", absent)
    engine.run("m-encode")
    engine.add("m@again", [5, absent, 5, PICTURE, 1], GREEDY)
    engine.run("m@again")
    assert len(engine.tokens["m@again"]) == 12
    engine.assert_empty()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_token_ids": []}, "0 tokens"),
        ({"prompt_token_ids": [5] * 256}, "max_model_len is 256"),
        ({"prompt_token_ids": [5] * 200, "output_token_ids": [5] * 56}, "max_model_len is 256"),
        ({"prompt_token_ids": [5, 1024]}, "outside the vocabulary"),
        ({"prompt_token_ids": [5, -1]}, "outside the vocabulary"),
        ({"output_token_ids": [4000]}, "outside the vocabulary"),
        ({"features": [(18, 4, (1, 4, 4))]}, "image 1: has tokens 18 to 22"),
        ({"features": [(2, 4, (1, 4, 4)), (4, 4, (1, 4, 4))]}, "image 2: has tokens 4 to 8, free are 6"),
        ({"features": [(2, 4, (1, 6, 4))]}, "contradict"),
    ],
)
def test_a_request_that_would_end_the_engine_is_refused(engine: Engine, changes: dict[str, Any], words: str) -> None:
    width = engine.client.info.embed_width
    features = [
        PlacedFeature(Feature("a" * 64, n, grid, width), offset) for offset, n, grid in changes.get("features", [])
    ]
    values = {"prompt_token_ids": [5] * 20, "sampling": GREEDY, **changes, "features": features}
    engine.ended.pop("bad", None)
    engine.client.add(EngineCoreRequest("bad", 0.0, **values))
    engine.run("bad")
    assert engine.ended["bad"].error_kind is ErrorKind.INVALID_REQUEST
    assert words in engine.ended["bad"].error
    engine.assert_empty()


def test_what_is_no_image_fails_alone(engine: Engine) -> None:
    broken = PICTURE[: len(PICTURE) // 2]
    engine.encode("good", picture(50, 64, 64))
    engine.encode("broken", broken)
    engine.run("good", "broken")
    assert engine.ended["good"].error_kind is None
    assert engine.ended["broken"].error_kind is ErrorKind.INVALID_REQUEST
    engine.assert_empty()


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_step_leave_nothing_behind(make_engine: MakeEngine, engine: Engine, seed: int) -> None:
    draw = random.Random(seed)
    images = [picture(100 + i, 224, 224) for i in range(4)]  # each takes most of a step's budget
    live: list[str] = []
    for turn in range(60):
        if draw.random() < 0.5:
            name = f"x{seed}-{turn}"
            if draw.random() < 0.4:
                engine.encode(name, draw.choice(images))
            else:
                engine.add(name, [draw.randint(1, 60), draw.choice([*images, PICTURE]), 3], GREEDY)
            live.append(name)
        if live and draw.random() < 0.4:
            engine.client.abort(live.pop(draw.randrange(len(live))))
        engine.step()
    for name in live:
        engine.client.abort(name)
    engine.assert_empty()
    assert engine.client.core.executor.worker.runner._batch._row_of == {}


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"max_model_len": 5000}, "--max-model-len"),
        ({"num_gpu_blocks": 2}, "--num-gpu-blocks"),
        ({"dtype": "int8"}, "--dtype"),
        ({"device": "cuda"}, "--device"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(make_engine: MakeEngine, changes: dict[str, Any], option: str) -> None:
    import torch

    if option == "--device" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError) as caught:
        make_engine(**changes)
    assert caught.value.name == option
