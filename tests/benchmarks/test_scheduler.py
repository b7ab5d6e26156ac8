"""The benchmark of the scheduler runs, drives what it says it drives, and says when a goal is missed."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.connectors.report import machine_now
from benchmarks.scheduler.__main__ import main
from benchmarks.scheduler.measuring import Row, row_of, rows_of
from benchmarks.scheduler.ours import Ours, connector_in
from benchmarks.scheduler.report import Report, line_of, write_plot
from benchmarks.scheduler.vllm_peer import NoVllmError, Vllm
from benchmarks.scheduler.workload import BLOCK_SIZE, Point, requests_of
from connectors.ec.base import ECConnectorBase

#: Stands in for vLLM's interpreter: speaks the same lines, and takes a millisecond for every step.
_STAND_IN = """#!{python}
import json, sys
num = 0
for line in sys.stdin:
    question = json.loads(line)
    answer = {{}}
    if "start" in question:
        assert question["start"]["prompts"] and question["start"]["max_num_seqs"] == 2
        answer, num = {{"scheduler": num}}, num + 1
    elif "steps" in question:
        answer = {{"seconds": [0.001] * question["steps"]}}
    elif not question:
        answer = {{"version": "0.0"}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def connector(tmp_path: Path) -> Iterator[ECConnectorBase]:
    connector = connector_in(tmp_path)
    yield connector
    connector.close()


def stand_in(folder: Path, script: str = _STAND_IN) -> Path:
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(script.format(python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return folder


def row(**changes: object) -> Row:
    good = Row(1, 0, "all decode", 10.0, 20.0, 30.0, 40.0, 0.33, (0.3, 0.4), 1.0, 100)
    return msgspec.structs.replace(good, **changes)


@pytest.mark.parametrize("turnover", [False, True])
def test_as_many_run_and_wait_as_the_point_says(turnover: bool, connector: ECConnectorBase) -> None:
    """In every step that is timed, each running request gets one token; only with turnover are others taken in."""
    ours = Ours(requests_of(Point(4, 30, turnover), 120), connector)
    ended = 0
    for _ in range(120):
        before = ours._scheduler.stats.counters["generation_tokens_total"]
        assert ours.steps(1)[0] > 0.0
        stats = ours._scheduler.make_stats()
        assert stats.counters["generation_tokens_total"] == before + 4
        assert stats.num_waiting + stats.num_running == 34
        ended += stats.num_running < 4
    assert bool(ended) == turnover
    counters = ours._scheduler.stats.counters
    assert counters["num_preemptions_total"] == counters["prefix_cache_hits_total"] == 0


def test_no_prompt_begins_like_another() -> None:
    prompts = requests_of(Point(256, 10_000, True), 280).prompts
    assert len({tuple(prompt[:BLOCK_SIZE]) for prompt in prompts}) == len(prompts)


def test_both_take_turns_and_are_compared(tmp_path: Path, connector: ECConnectorBase) -> None:
    with Vllm(stand_in(tmp_path / "vllm")) as vllm:
        rows = list(rows_of(2, [0, 50], False, vllm=vllm, rounds=3, steps=4, connector=connector))
    assert [(r.running, r.waiting, r.steps) for r in rows] == [(2, 0, 12), (2, 50, 12)]
    for made in rows:
        assert made.vllm_us == pytest.approx(1000.0)
        assert made.ratio is not None
        assert 0.0 < made.ratio <= made.us_p99 / 1000.0, "a median of ours, in milliseconds"
        assert made.to_empty > 0.0


def test_what_is_made_of_the_times() -> None:
    """Three rounds of two steps, in seconds; the last one was disturbed for both."""
    ours = [[1e-3, 3e-3], [2e-3, 4e-3], [10e-3, 20e-3]]
    made = row_of(
        Point(2, 50, False), ours, [[1e-3] * 2, [2e-3] * 2, [20e-3] * 2], [[8e-3] * 2, [4e-3] * 2, [30e-3] * 2]
    )
    assert (made.running, made.waiting, made.steps) == (2, 50, 6)
    assert (made.us, made.us_p99) == pytest.approx((4_000.0, 20_000.0))
    assert (made.vllm_us, made.vllm_us_p99) == pytest.approx((8_000.0, 30_000.0))
    assert made.ratio == pytest.approx(0.5)
    assert made.ratio_quartiles == pytest.approx((0.375, 0.625))
    assert made.to_empty == pytest.approx(1.5)


@pytest.mark.parametrize("script", ["#!/bin/sh\necho no such thing >&2; exit 3\n", "#!/bin/sh\nread a; echo { }\n"])
def test_a_vllm_that_does_not_work_is_named(script: str, tmp_path: Path) -> None:
    with pytest.raises((NoVllmError, KeyError)):
        Vllm(stand_in(tmp_path, script.replace("{ }", "{{}}")))
    with pytest.raises(NoVllmError, match="bin/python"):
        Vllm(tmp_path / "elsewhere")


def test_misses_are_told(tmp_path: Path) -> None:
    slow, grown = row(ratio=0.51), row(to_empty=1.3)
    report = Report(machine_now(os.getloadavg(), 1), "1.2.3", [row(), slow, grown, row(ratio=None, vllm_us=None)])
    assert report.misses == [slow, grown]
    assert "1 of 3 points above 50%" in report.summary()
    assert "slower" in line_of(slow)
    assert "grows" in line_of(grown)
    assert line_of(row()).endswith("yes")
    assert [line["reached"] for line in json.loads(report.to_json())["rows"]] == [True, False, True, None]
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM it measures ours, says so, and does not pass a check."""
    monkeypatch.delenv("TRIPTYCH_BENCH_VLLM", raising=False)
    file = tmp_path / "figures.json"
    small = ["--running", "1,3", "--waiting", "0,20", "--repeat", "2", "--steps", "3", "--json", str(file), "--check"]
    result = CliRunner().invoke(main, small)
    assert result.exit_code == 1, result.output
    assert "not measured" in result.output
    assert len(json.loads(file.read_bytes())["rows"]) == 8


@pytest.mark.parametrize(
    "wrong", [["--running", "0"], ["--waiting", "1,x"], ["--running", "1000000"], ["--repeat", "1000"]]
)
def test_wrong_options_are_named(wrong: list[str]) -> None:
    result = CliRunner().invoke(main, wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output
