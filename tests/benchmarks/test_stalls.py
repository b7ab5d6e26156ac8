"""The benchmark of stalls runs, loads what it says it loads, and says when a goal is missed."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.connectors.report import machine_now
from benchmarks.stalls import holds, lanes
from benchmarks.stalls.__main__ import main
from benchmarks.stalls.holds import HoldRow
from benchmarks.stalls.lanes import STORES, Lane, RemoteLane
from benchmarks.stalls.latency import LatencyRow, Measured, measure, row_of
from benchmarks.stalls.report import Report, hold_line, latency_line

SIZE = 768 << 10


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("name", ["shared storage", "Redis", "shared memory"])
def test_a_lane_loads_the_item(name: str, tmp_path: Path, stack: ExitStack) -> None:
    """Making it compares what came with what was saved."""
    lane = Lane(STORES[name](tmp_path, SIZE, stack), stack)
    lane.turn(False)
    assert lane.num_loads == 0
    lane.turn(True)
    lane.settle()
    assert lane.num_loads == 1


def test_a_load_of_the_slow_store_is_under_way_for_many_turns(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "SLOW_S", 1.0)
    lane = Lane(STORES["300 ms a load"](tmp_path, SIZE, stack), stack)
    for _ in range(3):
        lane.turn(True)
    lane.settle()
    assert lane.num_loads == 1


def test_a_lane_in_a_process_of_its_own(tmp_path: Path, stack: ExitStack) -> None:
    lane = RemoteLane(STORES["shared storage"](tmp_path, SIZE, stack), stack)
    lane.turn(False)
    lane.turn(True)
    lane.settle()
    lane.settle()
    assert lane.num_loads == 1


class Clockwork:
    """Stands in for the engine: each step takes a second, two where a load is ordered."""

    def decode(self, num_steps: int, turn: object) -> list[float]:
        assert callable(turn)
        seconds = []
        for step in range(num_steps):
            self.took_s = 1.0
            turn(step)
            seconds.append(self.took_s)
        return seconds


def test_loads_come_every_so_many_steps_and_are_compared_with_none() -> None:
    engine = Clockwork()

    class Ordered:
        num_loads = 0

        def turn(self, begins: bool) -> None:
            self.num_loads += begins
            engine.took_s += begins

        def settle(self) -> None: ...

    alone, beside, apart = Measured(None), Measured(Ordered()), Measured(Ordered())  # type: ignore[arg-type]
    measure(engine, [alone, beside, apart], rounds=3, steps=8, every=4)  # type: ignore[arg-type]
    row = row_of("Redis", beside, alone, apart)
    assert (row.ms_p50, row.ms_p99, row.to_alone, row.to_apart, row.loads) == (1000.0, 2000.0, 2.0, 1.0, 6)
    assert row.steps == 24
    assert row.reached is False
    assert row_of("alone", alone, alone, None).reached is None


def test_the_holds_of_every_store_are_looked_at(tmp_path: Path) -> None:
    rows = list(holds.rows(tmp_path, SIZE, 2, with_peers=False))
    assert all(isinstance(row, HoldRow) for row in rows), rows
    what = [row.what for row in rows if isinstance(row, HoldRow)]
    assert what[0] == holds.NOTHING
    for store in ("shared storage", "shared memory", "Redis"):
        assert {f"{store}: save", f"{store}: load"} <= set(what)


def test_misses_are_told() -> None:
    late = LatencyRow("Redis", 10.0, 30.0, 1.5, 25.0, 1.2, 4, [30.0], 40)
    fine = msgspec.structs.replace(late, to_alone=1.2)
    long, brief = HoldRow("Redis: load", 1.0, 0.4, 30.0, 5), HoldRow("Redis: save", 0.9, 0.4, 30.0, 5)
    report = Report(machine_now(os.getloadavg(), 1), [late, fine], [long, brief], {"peer": "no reason"})
    assert report.misses == ["Redis", "Redis: load"]
    assert "peer: not measured: no reason" in report.summary()
    assert latency_line(late).endswith("NO")
    assert latency_line(fine).endswith("yes")
    assert hold_line(long).endswith("NO")
    raw = json.loads(report.to_json())
    assert [row["reached"] for row in raw["latency"] + raw["holds"]] == [False, True, False, True]


def test_the_program_with_a_small_model(tiny_model: Path, tmp_path: Path) -> None:
    before_s = sys.getswitchinterval()
    file = tmp_path / "figures.json"
    small = ["--only", "latency", "--model", str(tiny_model), "--mib", "1", "--repeat", "2", "--steps", "6"]
    try:
        result = CliRunner().invoke(
            main, [*small, "--every", "3", "--lanes", "shared storage", "--folder", str(tmp_path), "--json", str(file)]
        )
    finally:
        sys.setswitchinterval(before_s)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_bytes())["latency"]
    assert [row["beside"] for row in rows] == ["alone", "shared storage"]
    assert rows[1]["loads"] >= 2
    assert statistics.fmean(row["steps"] for row in rows) == 12


@pytest.mark.parametrize("wrong", [["--only", "x"], ["--mib", "0"], ["--lanes", "x"], ["--steps", "1"]])
def test_wrong_options_are_named(wrong: list[str]) -> None:
    result = CliRunner().invoke(main, wrong)
    assert result.exit_code == 2
    assert wrong[0].split(",")[0] in result.output
