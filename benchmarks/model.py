"""The checkpoint that benchmarks of whole engines run: a random-weight Qwen3-VL of 270 million parameters in bf16."""

from __future__ import annotations

from pathlib import Path

from demo.random_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parent.parent


def bench_model() -> Path:
    """Its folder; made the first time, in the checkout's `.cache`."""
    model = ROOT / ".cache" / "bench-model"
    if not (model / "config.json").is_file():
        model.parent.mkdir(exist_ok=True)
        make_checkpoint(model, preset="bench", dtype="bfloat16")
    return model
