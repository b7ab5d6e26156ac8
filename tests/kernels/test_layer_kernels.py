"""Norm, rotary positions and SwiGLU: kernels and CPU implementations against their twins in float64.

Errors are relative, `|made - exact| / |exact|` over the whole tensor. The bounds are some roundings of the dtype: the
interpreter cuts off bfloat16 where a GPU rounds. What a launcher allocates is NaN before it is written (conftest.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.layer_cpu import add_rms_norm_cpu, norm_rotary_cpu, rms_norm_cpu, rotary_cpu, swiglu_cpu
from kernels.limits import MAX_WIDTH
from kernels.mrope_axes import blocked_axes, interleaved_axes
from kernels.norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from kernels.rotary import mrope_angles, mrope_angles_torch, norm_rotary, norm_rotary_torch, rotary, rotary_torch
from kernels.swiglu import swiglu, swiglu_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float32: 5e-7, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
EPS = 1e-6


def error(made: torch.Tensor, exact: torch.Tensor) -> float:
    assert made.shape == exact.shape
    return float((made.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def rows_of(num_rows: int, width: int, dtype: torch.dtype, sizes: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Rows that are contiguous in themselves but not one behind the other, among NaN."""
    wide = torch.full((num_rows, width + 5), torch.nan, dtype=dtype)
    wide[:, 2 : width + 2] = (torch.randn(num_rows, width) * sizes).to(dtype)
    return wide[:, 2 : width + 2]


def sizes_of(*shape: int) -> torch.Tensor:
    """From 1 down to where the epsilon of a norm counts as much as the squares."""
    return 10.0 ** (-3 * torch.rand(shape))


RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddRmsNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
Rotary = Callable[[torch.Tensor, torch.Tensor], None]
NormRotary = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]


@pytest.mark.parametrize(("plain", "add"), [(rms_norm, add_rms_norm), (rms_norm_cpu, add_rms_norm_cpu)])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(num_rows=st.integers(1, 5), width=st.sampled_from([1, 63, 64, 65, 1023, 1500]), seed=st.integers(0, 2**31))
def test_rms_norm(plain: RmsNorm, add: AddRmsNorm, dtype: torch.dtype, num_rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, residual = (rows_of(num_rows, width, dtype, sizes_of(num_rows, 1)) for _ in range(2))
    weight = torch.randn(width).to(dtype)
    exact_sum = x.double() + residual.double()
    assert error(plain(x, weight, EPS), rms_norm_torch(x.double(), weight.double(), EPS)) < BOUNDS[dtype]
    made = add(x, residual, weight, EPS)
    assert error(residual, exact_sum) < BOUNDS[dtype]
    # From the sum as it was rounded: a row of one element can be all rounding.
    assert error(made, rms_norm_torch(residual.double(), weight.double(), EPS)) < BOUNDS[dtype]


def test_the_twin_of_the_add_is_an_add_and_a_norm() -> None:
    x, residual, weight = (torch.randn(3, 8, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.rms_norm(x + residual, (8,), weight[0], EPS)
    assert torch.allclose(add_rms_norm_torch(x, residual, weight[0], EPS), expected, rtol=1e-14)


@pytest.mark.parametrize("made_by", [swiglu, swiglu_cpu])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None)
@given(num_rows=st.integers(1, 4), width=st.sampled_from([1, 63, 65, 1024, 1100]), seed=st.integers(0, 2**31))
def test_swiglu(
    made_by: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, num_rows: int, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    gate_up = rows_of(num_rows, 2 * width, dtype)
    assert error(made_by(gate_up), swiglu_torch(gate_up.double())) < BOUNDS[dtype]


@pytest.mark.parametrize("num_rows", [1, 3])
@settings(max_examples=8, deadline=None)
@given(
    num_tokens=st.integers(1, 5), half=st.sampled_from([1, 8, 20, 40]), high=st.sampled_from([4, 5000, 200_000]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_angles(num_rows: int, num_tokens: int, half: int, high: int, seed: int) -> None:
    """The exact ones are those of the float32 product of position and frequency: models are trained on them."""
    torch.manual_seed(seed)
    positions = torch.randint(0, high, (num_rows, num_tokens + 2))[:, :num_tokens]  # a decode batch's are such a part
    inv_freq = 1e6 ** (-torch.arange(half, dtype=torch.float32) / half)
    axes = torch.randint(0, num_rows, (half,))
    made = mrope_angles(positions, inv_freq, axes, 1.5)
    products = positions[axes].T.float() * inv_freq
    exact = torch.cat((products.double().cos(), products.double().sin()), dim=1) * 1.5
    assert made.dtype == torch.float32
    assert error(made, exact) < 2e-7
    assert error(mrope_angles_torch(positions, inv_freq, axes, 1.5), exact) < 2e-7


@pytest.mark.parametrize("sections", [[6, 5, 5], [8, 5, 3]])
def test_sections_go_by_the_rows_that_transformers_takes(sections: list[int]) -> None:
    """Both layouts, against the functions of the model classes themselves."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    half = 16
    rows = torch.tensor([10.0, 20.0, 30.0])[:, None, None, None].expand(3, 1, 2, half).clone()
    for kind, axes in (
        (Qwen2_5_VLRotaryEmbedding, blocked_axes(sections)),
        (Qwen3VLTextRotaryEmbedding, interleaved_axes(sections, half)),
    ):
        module: Any = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        module.mrope_section = sections
        merged = module.recomposition_frequencies(rows.clone())[0, 0, :half]
        assert ((axes + 1) * 10.0).tolist() == merged.tolist()


@pytest.mark.parametrize(("plain", "with_norm"), [(rotary, norm_rotary), (rotary_cpu, norm_rotary_cpu)])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(
    num_tokens=st.integers(1, 4), num_heads=st.sampled_from([1, 3, 9]), half=st.sampled_from([8, 20, 32, 40]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rotary(
    plain: Rotary, with_norm: NormRotary, dtype: torch.dtype, num_tokens: int, num_heads: int, half: int, seed: int
) -> None:
    """In place on a part of a projection; what stands beside it is left alone."""
    torch.manual_seed(seed)
    beside = torch.randn(num_tokens, 2, 2 * half).to(dtype)
    heads = torch.randn(num_tokens, num_heads, 2 * half) * sizes_of(num_tokens, num_heads, 1)
    projection = torch.cat((heads.to(dtype), beside), dim=1)
    phases = torch.rand(num_tokens, half) * 6
    angles = torch.cat((phases.cos(), phases.sin()), dim=1)
    gains = torch.randn(num_heads, 2 * half).to(dtype)
    for gained in (False, True):
        made, exact = projection.clone(), projection[:, :num_heads].double()
        if gained:
            with_norm(made[:, :num_heads], angles, gains, EPS)
            norm_rotary_torch(exact, angles.double(), gains.double(), EPS)
        else:
            plain(made[:, :num_heads], angles)
            rotary_torch(exact, angles.double())
        assert error(made[:, :num_heads], exact) < BOUNDS[dtype]
        assert torch.equal(made[:, num_heads:], beside)


def test_rounding_is_where_transformers_rounds() -> None:
    """The sum, the normalised row and each head's, before the gains. What is rounded elsewhere differs in every third
    element and more; what differs here is where two float32 sums do."""
    torch.manual_seed(0)
    x, residual, gain = torch.randn(8, 512).half(), torch.randn(8, 512).half(), torch.randn(512).half()
    heads, gains, phases = torch.randn(8, 6, 64).half(), torch.randn(6, 64).half(), torch.rand(8, 32) * 6
    angles = torch.cat((phases.cos(), phases.sin()), dim=1)
    twin_residual, twin_heads = residual.clone(), heads.clone()
    norm_rotary(heads, angles, gains, EPS)
    norm_rotary_torch(twin_heads, angles, gains, EPS)
    for made, expected in (
        (rms_norm(x, gain, EPS), rms_norm_torch(x, gain, EPS)),
        (add_rms_norm(x, residual, gain, EPS), add_rms_norm_torch(x, twin_residual, gain, EPS)),
        (residual, twin_residual),
        (heads, twin_heads),
    ):
        assert float((made != expected).double().mean()) < 0.01


def test_no_tokens() -> None:
    empty, weight = torch.empty(0, 8), torch.ones(8)
    assert rms_norm(empty, weight, EPS).shape == add_rms_norm(empty, empty, weight, EPS).shape == (0, 8)
    assert swiglu(empty).shape == (0, 4)
    assert (
        mrope_angles(torch.empty(3, 0, dtype=torch.int64), weight[:4], torch.zeros(4, dtype=torch.int64)).shape
        == empty.shape
    )
    rotary(torch.empty(0, 2, 8), empty)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: rms_norm(torch.ones(2, MAX_WIDTH + 1), torch.ones(MAX_WIDTH + 1), EPS), "(2, 32769)"),
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(4), EPS), "(4,)"),
        (lambda: rms_norm(torch.ones(8, 2).T, torch.ones(8), EPS), "(1, 2)"),
        (lambda: rms_norm(torch.ones(2, 8), torch.ones(16)[::2], EPS), "(8,)"),
        (lambda: add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), EPS), "(1, 8)"),
        (lambda: add_rms_norm(torch.ones(2, 8), torch.ones(2, 8).half(), torch.ones(8), EPS), "float16"),
        (lambda: add_rms_norm(torch.ones(2, 8), torch.ones(8, 2).T, torch.ones(8), EPS), "strides (1, 2)"),
        (lambda: swiglu(torch.ones(2, 7)), "(2, 7)"),
        (lambda: rotary(torch.ones(2, 1, 258), torch.ones(2, 258)), "(2, 1, 258)"),
        (lambda: rotary(torch.ones(2, 1, 7), torch.ones(2, 7)), "(2, 1, 7)"),
        (lambda: norm_rotary(torch.ones(2, 3, 8), torch.ones(2, 8), torch.ones(2, 8), EPS), "(2, 8)"),
        (lambda: mrope_angles(torch.ones(3, 2, dtype=torch.int64), torch.ones(4), torch.ones(3)), "(3,)"),
    ],
)
def test_a_shape_that_is_not_supported_is_named(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        call()
