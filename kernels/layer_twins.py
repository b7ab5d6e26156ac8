"""What the kernels of a layer must compute, in plain PyTorch, on any device and in any dtype, float64 too.

Signatures, shapes and effects are those of the functions without `_torch` (`norm.py`, `rotary.py`, `swiglu.py`). No
Triton is imported, so that a machine without it has these. Half precision is widened to float32, as in the kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension."""
    return _normed(x, eps) * weight


def add_rms_norm_torch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x`, in place, and the norm of the sum."""
    residual.add_(x)
    return _normed(residual, eps) * weight


def swiglu_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of the two halves of each row."""
    gate, up = gate_up.to(_wide(gate_up.dtype)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def mrope_angles_torch(
    positions: torch.Tensor, inv_freq: torch.Tensor, axes: torch.Tensor, scaling: float = 1.0
) -> torch.Tensor:
    """Cosines and then sines of each token."""
    angles = positions[axes].T.to(inv_freq.dtype) * inv_freq  # [num_tokens, num_frequencies]
    return torch.cat((angles.cos(), angles.sin()), dim=1) * scaling


def rotary_torch(heads: torch.Tensor, angles: torch.Tensor) -> None:
    """The halves of each head against each other, in place."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=2)
    low, high = heads.to(angles.dtype).chunk(2, dim=2)
    heads.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=2))


def norm_rotary_torch(heads: torch.Tensor, angles: torch.Tensor, gains: torch.Tensor, eps: float) -> None:
    """RMSNorm of every head, and then its rotation, in place."""
    heads.copy_(_normed(heads, eps) * gains)
    rotary_torch(heads, angles)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(_wide(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
