"""Linear layers whose weights are laid out for oneDNN once, at load, instead of at every call (CPU only).

A decode step reads every weight once and computes little, so the reordering that a plain call does is most of its cost:
with packed weights a bf16 product of one to eight rows takes 0.6 times as long on two cores (`benchmarks/` has the
measurement), and the results are equal bit for bit in bf16.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on the CPU: `[..., in_features]` -> `[..., out_features]`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # The number of rows is a hint for oneDNN's choice of layout; decode steps are what the layout is for.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and dtype have packed products."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def pack_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` below `module`, in place. The plain weights are freed."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
