"""When a step needs all processors: how many there are, and that loads are told while it computes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from connectors.ec.store_connector import ECStoreConnector
from core.types import SamplingParams
from engine import processors
from engine.executor.in_process import InProcessExecutor
from engine.model_runner import ModelRunner
from engine.processors import Crowding, usable_processors
from engine.scheduler_output import SchedulerOutput
from tests.engine.engines import Engine, engine_config

HERE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "max 100000\n"}, HERE),
        ({"cpu.max": f"{HERE * 300000} 100000\n"}, HERE),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, HERE),
        ({"cpu.max": "what is this"}, HERE),
        ({}, HERE),
    ],
)
def test_a_containers_share_counts(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_processors(tmp_path) == expected


@pytest.mark.parametrize(("num_processors", "crowded"), [(0.5, True), (2, True), (2.9, True), (3, False), (64, False)])
def test_a_step_of_one_thread_leaves_two_processors_or_crowds_loads_out(
    num_processors: float, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "usable_processors", lambda: num_processors)
    crowding = Crowding(num_threads=1)
    assert not crowding()
    crowding.is_stepping = True
    assert crowding() is crowded


def test_connectors_are_told_while_a_step_computes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "usable_processors", lambda: 1)
    told: list[bool] = []
    generate = ModelRunner._generate

    def ask_meanwhile(runner: ModelRunner, out: SchedulerOutput) -> object:
        assert isinstance(runner._ec, ECStoreConnector)
        told.append(runner._ec.config.is_crowded())
        return generate(runner, out)

    monkeypatch.setattr(ModelRunner, "_generate", ask_meanwhile)
    engine = Engine(engine_config(tiny_model, tmp_path, async_scheduling=False))
    try:
        engine.add("r", [9], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        engine.run("r")
        assert told == [True] * 3
        executor = engine.client.core.executor
        assert isinstance(executor, InProcessExecutor)
        assert not executor.worker.runner.crowding()
    finally:
        engine.client.close()
