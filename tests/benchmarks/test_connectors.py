"""The benchmark of the connectors runs, compares like with like, and says when a goal is missed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.connectors import bare_zmq, measuring
from benchmarks.connectors.__main__ import main
from benchmarks.connectors.bare_zmq import BareZMQ
from benchmarks.connectors.children import Child
from benchmarks.connectors.items import empty_item, expect_same, random_item
from benchmarks.connectors.kv_pull import form_of
from benchmarks.connectors.measuring import Comparison, Contender, measure

ROOT = Path(__file__).resolve().parents[2]
SMALL, LARGE = 4 << 10, 768 << 10  # one chunk or block, and several
SHARED_MEMORY = {f"shared memory {way}, {how}" for way in ("load", "save") for how in ("bare", "verified")}


def expected(size_bytes: int) -> set[tuple[str, str]]:
    """Which comparisons there are."""
    rows = {(case, "memcpy") for case in (*SHARED_MEMORY, "KV pull, same host")}
    rows |= {("shared storage save", "save_file"), ("shared storage load", "load_file + copy_")}
    rows |= {("KV pull, network", "bare ZeroMQ"), ("EC peer load", "bare ZeroMQ")}
    bounds = ["redis-py GET", "bare socket"]
    if size_bytes == LARGE:
        bounds += ["redis-py GETs", "bare socket, chunked"]
    return rows | {("Redis load", bound) for bound in bounds}


def test_every_group_runs_as_a_program_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder, json_file, plot_file = tmp_path / "memory", tmp_path / "figures.json", tmp_path / "plot.png"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.connectors", "--sizes", "4KiB,768KiB", "--repeat", "1", "--check"]
    command += ["--folder", str(folder), "--json", str(json_file), "--plot", str(plot_file)]
    # What is said of warnings in tests holds for programs too.
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    # Two microseconds of memcpy are less than any connector needs: goals are missed, and `--check` says so.
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == ""
    result = json.loads(json_file.read_text())
    assert result["not_measured"] == {}
    assert result["machine"]["cores"] == os.cpu_count()
    for size_bytes in (SMALL, LARGE):
        rows = [row for row in result["rows"] if row["size_bytes"] == size_bytes]
        assert {(row["case"], row["bound"]) for row in rows} == expected(size_bytes)
        assert len(rows) == len(expected(size_bytes))
    for row in result["rows"]:
        assert row["ratio"] > 0
        assert row["gb_per_s"] == pytest.approx(row["size_bytes"] / row["us_per_item"] / 1e3)
        assert row["reached"] == (None if row["goal"] is None else row["ratio"] >= row["goal"])
        assert f"{row['case']} " in done.stdout
    assert any(row["reached"] is False for row in result["rows"])
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    assert list(folder.iterdir()) == []


class Clock:
    """Stands in for module time; a second passes only where it is told so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


def test_ratios_are_those_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow for a while slows both; what spoils one round of one of them does not count, nor do the
    rounds that warm up, nor what stands around the work."""
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)

    def contender(*rounds_ms: float) -> Contender:
        """By round, of which the first two warm up."""
        rounds = iter(rounds_ms)
        present_ms = 0.0

        @contextlib.contextmanager
        def around(turns: int) -> Iterator[None]:
            nonlocal present_ms
            assert turns == 2
            present_ms = next(rounds)
            clock.passes(1000)
            yield
            clock.passes(1000)

        return Contender(lambda: clock.passes(present_ms / 1e3), around)

    contenders = {"ours": contender(1, 1, 2, 2, 20), "bound": contender(900, 700, 1, 5, 10)}
    wanted = [Comparison("both", "ours", "bound", 0.4), Comparison("both", "ours", "bound", 0.6)]
    rows = measure(8 << 20, contenders, wanted, 3)
    assert [row.ratio for row in rows] == pytest.approx([0.5, 0.5])
    assert [row.reached for row in rows] == [True, False]
    assert rows[0].us_per_item == pytest.approx(2000)
    assert rows[0].bound_gb_per_s == pytest.approx((8 << 20) / 5e-3 / 1e9)


def test_what_moves_wrong_bytes_is_not_measured() -> None:
    sent, arrived = random_item(LARGE), empty_item(LARGE)
    arrived.copy_(sent)
    expect_same("a load", arrived, sent)
    with pytest.raises(RuntimeError, match="a load: what arrived is not what was sent"):
        expect_same("a load", arrived, sent)  # it was cleared


@pytest.mark.parametrize("num_blocks", [1, 3, 24, 80])
def test_bare_zeromq_brings_every_block_to_its_place(num_blocks: int) -> None:
    block_bytes = 256 << 10
    received = np.zeros((num_blocks + 2) * block_bytes, dtype=np.uint8)
    places = random.Random(0).sample(range(num_blocks), num_blocks)
    with Child(bare_zmq.serve) as sender, BareZMQ(sender) as bare:
        bare.prepare(num_blocks * block_bytes)
        bare.receive(received[: num_blocks * block_bytes], places, form_of(block_bytes, num_blocks))
    assert received[: num_blocks * block_bytes].all()
    assert not received[num_blocks * block_bytes :].any()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--sizes", "64", "'64' is not a size from 4KiB to 256MiB"),
        ("--sizes", "1MiB,257MiB", "'257MiB' is not a size from 4KiB to 256MiB"),
        ("--sizes", "5KiB", "'5KiB' is not a multiple of 4KiB"),
        ("--sizes", "260KiB", "'260KiB' is not a multiple of 256KiB"),
        ("--only", "kv,tape", "'tape' is none of shared-memory"),
        ("--repeat", "0", "0 is not in the range"),
        ("--folder", "/nowhere/at/all", "does not exist"),
    ],
)
def test_options_that_cannot_be_used_are_named(option: str, value: str, said: str) -> None:
    result = CliRunner().invoke(main, [option, value])
    assert result.exit_code == 2
    assert option in result.output
    assert said in " ".join(result.output.split())
