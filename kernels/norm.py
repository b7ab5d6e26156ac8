"""RMSNorm, alone or behind a residual add (Zhang and Sennrich, 2019, arXiv 1910.07467).

One program a row: it is read once, kept in registers, and written once. The sum with the residual is rounded to the
tensors' dtype before it is normalised, and the normalised row before it is multiplied with the gains, as in
transformers' modules; sums run in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layer_twins import add_rms_norm_torch, rms_norm_torch
from kernels.limits import MAX_WIDTH

__all__ = ["add_rms_norm", "add_rms_norm_torch", "rms_norm", "rms_norm_torch"]


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    stride_x,
    stride_residual,
    width,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)
    dtype: tl.constexpr = value.dtype
    if ADD:
        place = residual_ptr + row * stride_residual + column
        before = tl.load(place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(dtype)
        tl.store(place, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (normed * gain).to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    `x` `[num_rows, width]`, a row contiguous in itself; `weight` `[width]`. Returns a new contiguous tensor like `x`.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x`, in place, and the norm of the sum, as a new tensor. Shapes as in `rms_norm`; no overlap."""
    return _launch(x, residual, weight, eps)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, width = x.shape
    if width > MAX_WIDTH or weight.shape != (width,) or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"rms_norm: x {tuple(x.shape)} of strides {x.stride()}, weight {tuple(weight.shape)}; rows must be "
            f"contiguous, at most {MAX_WIDTH} wide, with one gain a column"
        )
    if residual is not None and (residual.shape != x.shape or residual.stride(1) != 1 or residual.dtype != x.dtype):
        raise ValueError(
            f"add_rms_norm: x {tuple(x.shape)} {x.dtype}, residual {tuple(residual.shape)} {residual.dtype} of strides "
            f"{residual.stride()}"
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows:
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            width,
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),  # 8 values a thread: 16 bytes of bf16 a load
        )
    return out
