"""What a layer computes besides matrix products and attention, as a CPU does it fastest.

Signatures and effects are those of the twins (`layer_twins.py`), which judge them. Two things count on a CPU: for few
tokens the number of operators, and for many fresh memory, whose pages the system hands out and zeroes one by one. So
results are written where their operands stood, and bf16 is not widened. Angles are rounded to the heads' dtype, as
transformers rounds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_cpu(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x`, in place, and the norm of the sum."""
    return F.rms_norm(residual.add_(x), weight.shape, weight, eps)


def swiglu_cpu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of the two halves of each row."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary_cpu(heads: torch.Tensor, angles: torch.Tensor) -> None:
    """The halves of each head against each other, in place."""
    _rotate(heads.clone(), angles, heads)


def norm_rotary_cpu(heads: torch.Tensor, angles: torch.Tensor, gains: torch.Tensor, eps: float) -> None:
    """RMSNorm of every head, and then its rotation, in place."""
    _rotate(F.rms_norm(heads, heads.shape[2:], None, eps).mul_(gains), angles, heads)


def _rotate(heads: torch.Tensor, angles: torch.Tensor, out: torch.Tensor) -> None:
    cos, sin = angles.to(heads.dtype).unsqueeze(1).chunk(2, dim=2)
    low, high = heads.chunk(2, dim=2)
    out_low, out_high = out.chunk(2, dim=2)
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin)
