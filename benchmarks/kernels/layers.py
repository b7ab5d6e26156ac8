"""Layer fusions and sampling, at the widths of a 7B model; beside them the twins, eager and through torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.kernels.measuring import Case, Sizes
from kernels.layer_twins import add_rms_norm_torch, norm_rotary_torch, rms_norm_torch, rotary_torch, swiglu_torch
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import mrope_angles, norm_rotary, rotary
from kernels.sampling import sample
from kernels.sampling_twin import sample_torch
from kernels.swiglu import swiglu

_BF16 = torch.bfloat16
_EPS = 1e-6


def _others(sizes: Sizes, twin: Callable[..., Any], *arguments: object) -> dict[str, Callable[[], object]]:
    contenders: dict[str, Callable[[], object]] = {"eager": lambda: twin(*arguments)}
    if not sizes.quick:  # compiling takes longer than all the rest
        compiled = functools.cache(lambda: torch.compile(twin, dynamic=False))
        contenders["compiled"] = lambda: compiled()(*arguments)
    return contenders


def cases(sizes: Sizes) -> Iterator[Case]:
    width, mlp = (64, 96) if sizes.quick else (3584, 18944)
    for num_tokens in (3,) if sizes.quick else (32, 8192):
        yield from _norms(sizes, num_tokens, width)
        gate_up = torch.randn(num_tokens, 2 * mlp, device=sizes.device).to(_BF16)
        yield Case(
            kernel="swiglu",
            shape=f"{num_tokens} x {mlp}",
            ours=functools.partial(swiglu, gate_up),
            num_bytes=1.5 * gate_up.nbytes,
            others=_others(sizes, swiglu_torch, gate_up),
        )
        yield from _rotations(sizes, num_tokens)
    yield from _sampling(sizes)


def _norms(sizes: Sizes, num_tokens: int, width: int) -> Iterator[Case]:
    x, residual = torch.randn(2, num_tokens, width, device=sizes.device).to(_BF16)
    gain = torch.rand(width, device=sizes.device).to(_BF16)
    yield Case(
        kernel="rms_norm",
        shape=f"{num_tokens} x {width}",
        ours=functools.partial(rms_norm, x, gain, _EPS),
        num_bytes=2 * x.nbytes,
        others=_others(sizes, rms_norm_torch, x, gain, _EPS),
    )
    x = x * 1e-3  # the residual grows by it at every call
    yield Case(
        kernel="add_rms_norm",
        shape=f"{num_tokens} x {width}",
        ours=functools.partial(add_rms_norm, x, residual, gain, _EPS),
        num_bytes=4 * x.nbytes,
        others=_others(sizes, add_rms_norm_torch, x, residual, gain, _EPS),
    )


def _rotations(sizes: Sizes, num_tokens: int) -> Iterator[Case]:
    num_heads, head_dim = (4, 16) if sizes.quick else (32, 128)
    heads = torch.randn(num_tokens, num_heads, head_dim, device=sizes.device).to(_BF16)
    half = head_dim // 2
    angles = mrope_angles(
        torch.randint(0, 8192, (3, num_tokens), device=sizes.device),
        1e6 ** (-torch.arange(half, device=sizes.device) / half),
        torch.arange(half, device=sizes.device) % 3,
    )
    gains = torch.ones(num_heads, head_dim, dtype=_BF16, device=sizes.device)
    shape = f"{num_tokens} x {num_heads} heads of {head_dim}"
    num_bytes = 2 * heads.nbytes + angles.nbytes
    yield Case(
        kernel="rotary",
        shape=shape,
        ours=functools.partial(rotary, heads, angles),
        num_bytes=num_bytes,
        others=_others(sizes, rotary_torch, heads, angles),
    )
    yield Case(
        kernel="norm_rotary",
        shape=shape,
        ours=functools.partial(norm_rotary, heads, angles, gains, _EPS),
        num_bytes=num_bytes,
        others=_others(sizes, norm_rotary_torch, heads, angles, gains, _EPS),
    )


def _sampling(sizes: Sizes) -> Iterator[Case]:
    vocab = 100 if sizes.quick else 151936
    for num_rows in (2,) if sizes.quick else (1, 32):
        logits = 4 * torch.randn(num_rows, vocab, device=sizes.device).to(_BF16)
        for name, temperature, top_k, top_p, min_p in (
            ("greedy", 0.0, 0, 1.0, 0.0),
            ("plain", 1.0, 0, 1.0, 0.0),
            ("top-k, top-p, min-p", 0.8, 50, 0.9, 0.05),
            ("top-p", 0.8, 0, 0.95, 0.0),
        ):
            parameters = (
                torch.full((num_rows,), temperature, device=sizes.device),
                torch.full((num_rows,), top_k, dtype=torch.int32, device=sizes.device),
                torch.full((num_rows,), top_p, dtype=torch.float64, device=sizes.device),
                torch.full((num_rows,), min_p, device=sizes.device),
                torch.arange(num_rows, device=sizes.device),
            )
            yield Case(
                kernel="sample",
                shape=f"{num_rows} x {vocab}, {name}",
                ours=functools.partial(sample, logits, *parameters),
                num_bytes=logits.nbytes,
                others={"eager": functools.partial(sample_torch, logits, *parameters)},
            )
