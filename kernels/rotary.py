"""Rotary positions on the heads of Q and K, in place, with or without a norm of each head before them.

M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1) gives each frequency one of three positions: time, height or width.
Which one is a matter of layout (`kernels/mrope_axes.py`), here one vector `axes`: the row of `positions` that each
frequency goes by. Plain rotary positions are one row, and zeros.

`mrope_angles` makes cosines and sines once a step; the layers' kernel reads them. Halves of a head are rotated against
each other, as in GPT-NeoX and Llama. The norm is RMSNorm over the head, rounded to the tensor's dtype as transformers
rounds it; the rotation runs in float32 and rounds once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layer_twins import mrope_angles_torch, norm_rotary_torch, rotary_torch
from kernels.limits import MAX_HEAD_DIM

__all__ = ["mrope_angles", "mrope_angles_torch", "norm_rotary", "norm_rotary_torch", "rotary", "rotary_torch"]

#: Heads that one program rotates.
_HEADS = 8


@triton.jit
def mrope_angles_kernel(
    positions_ptr,
    inv_freq_ptr,
    axes_ptr,
    out_ptr,
    stride_positions,
    scaling,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Grid (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    frequency = tl.arange(0, HALF_PAD)
    inside = frequency < HALF
    axis = tl.load(axes_ptr + frequency, mask=inside, other=0)
    position = tl.load(positions_ptr + axis * stride_positions + token, mask=inside, other=0)
    angle = position.to(tl.float32) * tl.load(inv_freq_ptr + frequency, mask=inside, other=0.0)
    out = out_ptr + token * (2 * HALF) + frequency
    tl.store(out, tl.cos(angle) * scaling, mask=inside)
    tl.store(out + HALF, tl.sin(angle) * scaling, mask=inside)


@triton.jit
def rotary_kernel(
    heads_ptr,
    angles_ptr,
    gains_ptr,
    stride_token,
    stride_head,
    num_heads,
    eps,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Grid (num_tokens, tiles of HEADS heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_PAD)
    angle_ptr = angles_ptr + token * (2 * HALF) + column
    cos = tl.load(angle_ptr, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=column < HALF, other=0.0)[None, :]
    inside = (head < num_heads)[:, None] & (column < HALF)[None, :]
    low_ptr = heads_ptr + token * stride_token + head[:, None] * stride_head + column[None, :]
    low = tl.load(low_ptr, mask=inside, other=0.0)
    high = tl.load(low_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = low.dtype
    low = low.to(tl.float32)
    if NORM:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        gain_ptr = gains_ptr + head[:, None] * (2 * HALF) + column[None, :]
        low_gain = tl.load(gain_ptr, mask=inside, other=0.0).to(tl.float32)
        high_gain = tl.load(gain_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
        low = ((low * scale).to(dtype).to(tl.float32) * low_gain).to(dtype).to(tl.float32)
        high = ((high * scale).to(dtype).to(tl.float32) * high_gain).to(dtype).to(tl.float32)
    tl.store(low_ptr, (low * cos - high * sin).to(dtype), mask=inside)
    tl.store(low_ptr + HALF, (high * cos + low * sin).to(dtype), mask=inside)


def mrope_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, axes: torch.Tensor, scaling: float = 1.0
) -> torch.Tensor:
    """Cosines and then sines, `[num_tokens, 2 * num_frequencies]` float32, times `scaling`.

    `positions` `[num_rows, num_tokens]` int64, rows contiguous; `inv_freq` `[num_frequencies]` float32; `axes`
    `[num_frequencies]` int64, each below `num_rows` (not checked: that would wait for the device).
    """
    num_tokens, half = positions.shape[1], len(inv_freq)
    if axes.shape != (half,) or positions.stride(1) != 1 or inv_freq.dtype is not torch.float32:
        raise ValueError(
            f"mrope_angles: positions {tuple(positions.shape)} {positions.stride()}, inv_freq {tuple(inv_freq.shape)} "
            f"{inv_freq.dtype}, axes {tuple(axes.shape)}"
        )
    out = torch.empty(num_tokens, 2 * half, dtype=torch.float32, device=positions.device)
    if num_tokens:
        mrope_angles_kernel[(num_tokens,)](
            positions,
            inv_freq,
            axes,
            out,
            positions.stride(0),
            scaling,
            HALF=half,
            HALF_PAD=triton.next_power_of_2(half),
            num_warps=1,
        )
    return out


def rotary(heads: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotate `heads` `[num_tokens, num_heads, head_dim]`, those of Q and K alike, in place.

    Any strides but for the last, which is 1: a view of the projection that made them. `angles` `[num_tokens, head_dim]`
    float32 from `mrope_angles`.
    """
    _launch(heads, angles, None, 0.0)


def norm_rotary(heads: torch.Tensor, angles: torch.Tensor, gains: torch.Tensor, eps: float) -> None:
    """RMSNorm of every head, with `gains` `[num_heads, head_dim]`, contiguous, and then `rotary`. In place."""
    _launch(heads, angles, gains, eps)


def _launch(heads: torch.Tensor, angles: torch.Tensor, gains: torch.Tensor | None, eps: float) -> None:
    num_tokens, num_heads, head_dim = heads.shape
    if (
        head_dim % 2
        or head_dim > MAX_HEAD_DIM
        or heads.stride(2) != 1
        or angles.shape != (num_tokens, head_dim)
        or not angles.is_contiguous()
        or (gains is not None and (gains.shape != (num_heads, head_dim) or not gains.is_contiguous()))
    ):
        raise ValueError(
            f"rotary: heads {tuple(heads.shape)} of strides {heads.stride()}, angles {tuple(angles.shape)}, gains "
            f"{None if gains is None else tuple(gains.shape)}; heads must be even, contiguous and at most "
            f"{MAX_HEAD_DIM} wide"
        )
    if not num_tokens:
        return
    half = head_dim // 2
    half_pad = triton.next_power_of_2(half)
    rotary_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        heads,
        angles,
        angles if gains is None else gains,
        heads.stride(0),
        heads.stride(1),
        num_heads,
        eps,
        HALF=half,
        HALF_PAD=half_pad,
        HEADS=_HEADS,
        NORM=gains is not None,
        num_warps=4 if half_pad >= 64 else 2,
    )
