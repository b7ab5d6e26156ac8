"""SwiGLU: the gated activation between the two linear layers of an MLP (Shazeer, 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.layer_twins import swiglu_torch

__all__ = ["swiglu", "swiglu_torch"]

_BLOCK = 1024


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, stride_in, width, BLOCK: tl.constexpr):
    """Grid (num_rows, tiles of the width)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * stride_in + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_in + width + column, mask=inside, other=0.0).to(tl.float32)
    made = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, made.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`: `[num_rows, 2 * width]`, each row its gate and then its up half, -> `[num_rows, width]`."""
    num_rows, both = gate_up.shape
    if both % 2 or gate_up.stride(1) != 1:
        raise ValueError(
            f"swiglu: {tuple(gate_up.shape)} of strides {gate_up.stride()}; a row must be two contiguous halves"
        )
    width = both // 2
    out = gate_up.new_empty(num_rows, width)
    if out.numel():
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        swiglu_kernel[grid](gate_up, out, gate_up.stride(0), width, BLOCK=_BLOCK, num_warps=4)
    return out
