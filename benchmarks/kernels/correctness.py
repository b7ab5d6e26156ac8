"""Each kernel against its twin in float64, on the device that is measured, fresh random inputs at every run."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernels.measuring import Sizes
from kernels.attention_twin import paged_decode_torch, paged_prefill_torch
from kernels.block_copy import gather_blocks, scatter_blocks
from kernels.cache_twins import gather_blocks_torch, kv_write_torch, scatter_blocks_torch, scatter_embeddings_torch
from kernels.embedding_scatter import scatter_embeddings
from kernels.kv_write import kv_write
from kernels.layer_twins import (
    add_rms_norm_torch,
    mrope_angles_torch,
    norm_rotary_torch,
    rms_norm_torch,
    rotary_torch,
    swiglu_torch,
)
from kernels.norm import add_rms_norm, rms_norm
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rotary import mrope_angles, norm_rotary, rotary
from kernels.sampling import sample
from kernels.sampling_twin import sample_torch
from kernels.swiglu import swiglu
from tests.kernels.attention_case import BOUNDS, AttentionCase, AttentionInputs, error, make_inputs

#: Runs a kernel in a dtype; the largest error.
Check = Callable[[Sizes, torch.dtype], float]

_HEADS = ((7, 128), (1, 80), (4, 64), (2, 256))  # group and size
_DECODES: tuple[tuple[int, int], ...] = ((0, 1), (62, 1), (64, 1), (1022, 1), (5000, 1))
_CHUNKS: tuple[tuple[int, int], ...] = ((0, 1), (0, 65), (1000, 63), (7, 300), (0, 0), (0, 1023))
#: Window, soft cap, and what is added to the scores from the first key to the last: beyond what exp2 holds.
_VARIANTS = ((0, 0.0, (0.0, 0.0)), (100, 2.5, (0.0, 0.0)), (0, 0.0, (-400.0, 300.0)), (0, 0.0, (300.0, -400.0)))


def _attention(decode: bool, fp8: bool, sizes: Sizes, dtype: torch.dtype) -> float:
    worst, device = 0.0, sizes.device
    for group, head_dim in _HEADS[:1] if sizes.quick else _HEADS:
        sequences = (_DECODES if decode else _CHUNKS)[: 2 if sizes.quick else None]
        seed = secrets.randbits(32)
        for window, soft_cap, ramp in _VARIANTS:
            case = AttentionCase(sequences, 16, 2, group, head_dim, dtype, fp8, seed, ramp)
            inputs = _moved(make_inputs(case, window=window), device)
            exact = inputs.in_float64()
            extras: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
            if decode:
                made = paged_decode(
                    inputs.query, inputs.layer_cache, inputs.block_table, inputs.seq_lens, case.scale,
                    cache_scales=inputs.cache_scales, **extras,
                )  # fmt: skip
                expected = paged_decode_torch(
                    exact.query, exact.layer_cache, exact.block_table, exact.seq_lens, case.scale,
                    cache_scales=exact.cache_scales, **extras,
                )  # fmt: skip
            else:
                ends = torch.zeros(len(inputs.query), dtype=torch.int32, device=device)
                ends[10:40] = 39  # an image in the second sequence
                made = paged_prefill(
                    inputs.query, inputs.layer_cache, inputs.block_table, inputs.query_starts, inputs.seq_lens,
                    case.scale, span_ends=ends, cache_scales=inputs.cache_scales, **extras,
                )  # fmt: skip
                expected = paged_prefill_torch(
                    exact.query, exact.layer_cache, exact.block_table, exact.query_starts, exact.seq_lens,
                    case.scale, span_ends=ends, cache_scales=exact.cache_scales, **extras,
                )  # fmt: skip
            # Large scores allow for more than the bound: what they do is a part of it.
            worst = _larger(worst, error(made, expected) * BOUNDS[dtype] / case.bound)
    return worst


def _moved(inputs: AttentionInputs, device: torch.device) -> AttentionInputs:
    moved = {name: value.to(device) for name, value in vars(inputs).items() if value is not None}
    # Copied, a layer of the block-major cache would be one tensor of its own: a strided view again.
    moved["layer_cache"] = torch.stack((moved["layer_cache"],) * 2, dim=1)[:, 1]
    return replace(inputs, **moved)


def _larger(a: float, b: float) -> float:
    """NaN counts as larger than anything."""
    return a if a != a or a > b else b


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _norms(sizes: Sizes, dtype: torch.dtype) -> float:
    worst, device = 0.0, sizes.device
    for num_rows, width in ((1, 3584), (5 if sizes.quick else 1023, 1023), (65, 64)):
        x, residual = _random(device, dtype, num_rows, width), _random(device, dtype, num_rows, width)
        gain = _random(device, dtype, width)
        worst = _larger(worst, error(rms_norm(x, gain, 1e-6), rms_norm_torch(x.double(), gain.double(), 1e-6)))
        summed = (residual + x).double()  # the residual stream is of the model's dtype
        made = add_rms_norm(x, residual, gain, 1e-6)
        worst = _larger(worst, error(residual, summed))
        worst = _larger(worst, error(made, add_rms_norm_torch(torch.zeros_like(summed), summed, gain.double(), 1e-6)))
    return worst


def _swiglu(sizes: Sizes, dtype: torch.dtype) -> float:
    gate_up = _random(sizes.device, dtype, 65, 2 * 1023)
    return error(swiglu(gate_up), swiglu_torch(gate_up.double()))


def _rotary(sizes: Sizes, dtype: torch.dtype) -> float:
    worst, device = 0.0, sizes.device
    for num_tokens, head_dim in ((1, 128), (3 if sizes.quick else 1023, 80)):
        positions = torch.randint(0, 4096, (3, num_tokens), device=device)
        half = head_dim // 2
        inv_freq = 1e4 ** (-torch.arange(half, device=device) / half)
        axes = torch.arange(half, device=device) % 3
        angles = mrope_angles(positions, inv_freq, axes)
        worst = _larger(worst, error(angles, mrope_angles_torch(positions, inv_freq, axes).double()) / 100)
        gains = _random(device, dtype, 7, head_dim)
        for gained in (False, True):
            heads = _random(device, dtype, num_tokens, 7, head_dim)
            wide = heads.double()
            if gained:
                norm_rotary(heads, angles, gains, 1e-6)
                norm_rotary_torch(wide, angles.double(), gains.double(), 1e-6)
            else:
                rotary(heads, angles)
                rotary_torch(wide, angles.double())
            worst = _larger(worst, error(heads, wide))
    return worst


def _traffic(sizes: Sizes, dtype: torch.dtype) -> float:
    """1 where a copy differs from its twin's in a bit; else the error of what adds up, the deepstack embeddings."""
    device = sizes.device
    random = functools.partial(_random, device, dtype)
    same = True
    key, value, slots = random(65, 3, 80), random(65, 3, 80), torch.randperm(96, device=device)[:65]
    caches = [torch.zeros(6, 2, 2, 16, 3, 80, dtype=dtype, device=device) for _ in range(2)]
    kv_write(key, value, caches[0][:, 1], slots)
    kv_write_torch(key, value, caches[1][:, 1], slots)
    same &= torch.equal(*caches)
    rows = [cache.view(6, -1) for cache in caches]
    ids = torch.randperm(6, device=device)[:4]
    stagings = [torch.zeros_like(rows[0][:4]) for _ in range(2)]
    sums = [torch.zeros(4, 2, dtype=torch.int32, device=device) for _ in range(2)]
    gather_blocks(rows[0], ids, stagings[0], sums[0])
    gather_blocks_torch(rows[1], ids, stagings[1], sums[1])
    same &= torch.equal(*stagings) and torch.equal(*sums)
    scatter_blocks(stagings[0], ids.flip(0), rows[0], sums[0])
    scatter_blocks_torch(stagings[1], ids.flip(0), rows[1], sums[1])
    same &= torch.equal(*rows) and torch.equal(*sums)
    hidden = random(65, 72)
    expected = hidden.double()
    buffer, tokens, source = random(9, 144), torch.randperm(65, device=device)[:7], torch.randperm(9, device=device)[:7]
    for level in (0, 1):
        scatter_embeddings(hidden, buffer, tokens, source, level)
        scatter_embeddings_torch(expected, buffer.double(), tokens, source, level)
    return error(hidden, expected) if same else 1.0


def _sampling(sizes: Sizes, dtype: torch.dtype) -> float:
    """Share of the rows whose token differs from the twin's. A near tie may fall either way."""
    device, (num_rows, vocab) = sizes.device, (4, 203) if sizes.quick else (64, 5003)
    logits = 3 * _random(device, dtype, num_rows, vocab)
    which = torch.arange(num_rows, device=device)
    parameters = (
        torch.where(which % 4 == 0, 0.0, 0.5 + which / num_rows),
        (which % 3 * 20).to(torch.int32),
        1.0 - (which % 5).double() / 10,
        (which % 2) * 0.02,
        torch.randint(0, 2**62, (num_rows,), device=device),
    )
    return float((sample(logits, *parameters) != sample_torch(logits, *parameters)).double().mean())


def _times(factor: float) -> dict[torch.dtype, float]:
    return {dtype: factor * bound for dtype, bound in BOUNDS.items()}


CHECKS: dict[str, tuple[Check, dict[torch.dtype, float]]] = {
    "decode": (functools.partial(_attention, True, False), BOUNDS),
    "decode fp8": (functools.partial(_attention, True, True), BOUNDS),
    "prefill": (functools.partial(_attention, False, False), BOUNDS),
    "prefill fp8": (functools.partial(_attention, False, True), BOUNDS),
    "norms": (_norms, _times(2)),
    "swiglu": (_swiglu, BOUNDS),
    "rotary": (_rotary, _times(2)),
    "traffic": (_traffic, BOUNDS),
    "sampling": (_sampling, dict.fromkeys(BOUNDS, 0.02)),
}
