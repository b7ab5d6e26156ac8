"""The kernels' benchmark runs from end to end: here under the interpreter, on tiny shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from click.testing import CliRunner

from benchmarks.kernels.__main__ import main

_ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_kernel_is_checked_and_measured(tmp_path: Path) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "figures.png"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", "--device", "cpu", "--quick", "--json", file, "--plot", plot],
        cwd=_ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert {row["kernel"] for row in report["rows"]} == {
        "decode", "prefill", "kv_write", "gather_blocks", "scatter_blocks", "embeddings",
        "rms_norm", "add_rms_norm", "swiglu", "rotary", "norm_rotary", "sample", "model decode",
    }  # fmt: skip
    for row in report["rows"]:
        assert row["time_us"] > 0, row
        assert row["others_us"], row
        assert not row["failed"], row
    assert report["ceilings"]["copy_bytes_per_s"] > 0
    assert plot.stat().st_size > 0
    assert "goals missed" in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    """Before Triton is imported, which other tests of this process want interpreted."""
    if not torch.cuda.is_available():
        result = CliRunner().invoke(main, [])
        assert result.exit_code == 1
        assert "there is no GPU here" in result.output


def test_options_that_make_no_sense_are_refused() -> None:
    for arguments, message in (
        (["--device", "cpu"], "only with --quick"),
        (["--only", "decode,nonsense"], "'nonsense' is none of decode, prefill"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert message in result.output
