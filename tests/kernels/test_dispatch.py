"""Which kernels an engine gets: by device, variable, dtype and shape; and what is refused by name."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from kernels.attention_twin import paged_prefill_torch
from kernels.cache_twins import kv_write_torch
from kernels.dispatch import LayerShapes, choose_kernels
from tests.kernels.attention_case import AttentionCase, error, make_inputs

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
    kernels = choose_kernels(device, torch.bfloat16, SHAPES, environ)
    assert kernels.name == name
    assert (kernels.sample is not None) == (name == "triton")
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


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("environ", [{"TRITON_INTERPRET": "1"}, {}], ids=["triton", "torch"])
def test_attention_writes_and_then_sees_what_it_is_told_to(environ: dict[str, str], fp8: bool) -> None:
    """Soft cap, window, an image's span and the cache's scales reach both kernels; PyTorch's operators have none of
    them, and refuse each by its name. Two decodes, a later chunk and a prompt."""
    case = AttentionCase(((9, 1), (90, 1), (4, 6), (0, 3)), fp8=fp8)
    inputs = make_inputs(case)
    kernels = choose_kernels(CPU, case.dtype, SHAPES, environ)
    batch = kernels.plan(
        np.array([new for _, new in case.sequences]), inputs.seq_lens.numpy().astype(np.int64),
        inputs.block_table.numpy().astype(np.int64), block_size=case.block_size, dtype=case.dtype, device=CPU,
    )  # fmt: skip
    key, value = torch.randn(2, 11, 2, 16, generator=torch.Generator().manual_seed(1))
    span_ends = torch.tensor([0, 0, 0, 9, 9, 9, 9, 0, 0, 0, 0], dtype=torch.int32)  # positions 5 to 8 of the third
    extras = {"soft_cap": 1.5, "window": 5, "span_ends": span_ends, "cache_scales": inputs.cache_scales}
    arguments = (inputs.query, key, value, inputs.layer_cache, batch, case.scale)
    if kernels.name == "torch":
        for name, given in extras.items():
            if given is not None:
                with pytest.raises(ValueError, match=f"no {name}"):
                    kernels.attend(*arguments, **{name: given})  # type: ignore[arg-type]
        return
    twin = inputs.in_float64()
    written = twin.layer_cache.clone()
    block_of = np.repeat(np.arange(4), [1, 1, 6, 3])
    places = torch.tensor([9, 90, *range(4, 10), *range(3)])
    slots = inputs.block_table[block_of, places // 4].long() * 4 + places % 4
    kv_write_torch(key, value, written, slots, inputs.cache_scales)
    made = kernels.attend(*arguments, **extras)  # type: ignore[arg-type]
    expected = paged_prefill_torch(
        twin.query, written, twin.block_table, twin.query_starts, twin.seq_lens, case.scale,
        **extras,  # type: ignore[arg-type]
    )  # fmt: skip
    assert error(made, expected) < case.bound


def test_a_machine_without_triton_serves() -> None:
    program = """
import sys, torch
sys.modules["triton"] = None  # which is what makes an import of it fail
from kernels.dispatch import LayerShapes, choose_kernels
import kernels.device_batch, kernels.packed_linear
choose_kernels(torch.device("cpu"), torch.float32, LayerShapes(64, 4, 2, 16), {})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
