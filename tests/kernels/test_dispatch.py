"""Which kernels an engine gets: by device, variable, dtype and shape; and what is refused by name."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from core.errors import ConfigError
from kernels.dispatch import LayerShapes, choose_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPES = LayerShapes(hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=64)


@pytest.mark.parametrize(
    ("device", "environ", "name"),
    [
        (CPU, {}, "torch"),
        (CPU, {"TRIPTYCH_KERNELS": "torch"}, "torch"),
        (CPU, {"TRITON_INTERPRET": "0"}, "torch"),
        (CPU, {"TRITON_INTERPRET": "1"}, "triton"),
        (CPU, {"TRITON_INTERPRET": "1", "TRIPTYCH_KERNELS": "triton"}, "triton"),
        (CPU, {"TRITON_INTERPRET": "1", "TRIPTYCH_KERNELS": "torch"}, "torch"),
        (GPU, {}, "triton"),
        (GPU, {"TRIPTYCH_KERNELS": "torch"}, "torch"),
    ],
)
def test_the_choice(device: torch.device, environ: dict[str, str], name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose_kernels(device, torch.bfloat16, SHAPES, environ).name == name
    [line] = caplog.messages
    assert f"kernels: {name}" in line
    assert ("interpreted" in line) == (name == "triton" and device == CPU)


def test_a_cpu_has_implementations_of_its_own_and_a_gpu_the_twins() -> None:
    environ = {"TRIPTYCH_KERNELS": "torch"}
    assert choose_kernels(CPU, torch.float32, SHAPES, environ).swiglu.__name__ == "swiglu_cpu"
    assert choose_kernels(GPU, torch.float32, SHAPES, environ).swiglu.__name__ == "swiglu_torch"


@pytest.mark.parametrize(
    ("device", "dtype", "changes", "environ", "reason"),
    [
        (CPU, torch.float32, {}, {"TRIPTYCH_KERNELS": "cuda"}, "'cuda'.*triton, torch"),
        (CPU, torch.float32, {}, {"TRIPTYCH_KERNELS": "triton"}, "needs a GPU, or TRITON_INTERPRET=1"),
        (GPU, torch.float64, {}, {}, "float64"),
        (GPU, torch.bfloat16, {"head_dim": 288}, {}, "head_dim=288.*at most 256"),
        (GPU, torch.bfloat16, {"head_dim": 33}, {}, "head_dim=33.*even"),
        (GPU, torch.bfloat16, {"num_kv_heads": 3}, {}, "num_kv_heads=3"),
        (GPU, torch.bfloat16, {"num_heads": 128, "num_kv_heads": 1}, {}, "num_heads=128.*at most 64"),
        (GPU, torch.bfloat16, {"hidden_size": 40_000}, {}, "hidden_size=40000"),
    ],
)
def test_what_is_refused(
    device: torch.device, dtype: torch.dtype, changes: dict[str, int], environ: dict[str, str], reason: str
) -> None:
    shapes = LayerShapes(**{**{name: getattr(SHAPES, name) for name in SHAPES.__struct_fields__}, **changes})
    with pytest.raises(ConfigError, match=reason):
        choose_kernels(device, dtype, shapes, environ)


def test_a_machine_without_triton_serves() -> None:
    program = """
import sys, torch
sys.modules["triton"] = None  # which is what makes an import of it fail
from kernels.dispatch import LayerShapes, choose_kernels
import kernels.device_batch, kernels.packed_linear
choose_kernels(torch.device("cpu"), torch.float32, LayerShapes(64, 4, 2, 16), {})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
