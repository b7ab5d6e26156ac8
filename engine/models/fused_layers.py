"""Decoder layers over the kernels, in the place of transformers' own.

Llama, Qwen2, Qwen2.5 and Qwen3 have the same layer: norm, Q, K and V, rotary positions (behind a norm of each head in
Qwen3), attention, output projection, norm, SwiGLU MLP, with the residual added around both halves. `fuse_layers` moves
the weights of such a model into layers of ours once they are loaded; transformers' loop over the layers stays.

- Q, K and V are one product, and so are gate and up.
- A residual add and the norm behind it are one kernel, across layers too: what a layer passes on is the next layer's
  normed input, and the sum itself goes along in `StepContext.residual`. The last one passes on the final norm.
- A deepstack level is added straight from the encoder buffer, behind the layer that it belongs to.
- Cosines and sines are made once a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.models.attention import StepContext
from kernels.dispatch import Kernels


class FusedLayer(nn.Module):
    """One decoder layer. `next_norm` is what follows its sum: the next layer's first norm, or the model's last."""

    def __init__(self, layer: Any, next_norm: Any, kernels: Kernels, num_deepstack_levels: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.kernels = kernels
        self.index: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.has_deepstack_level = self.index < num_deepstack_levels
        self.input_norm = layer.input_layernorm
        self.mlp_norm = layer.post_attention_layernorm
        self.next_norm = next_norm
        self.eps: float = layer.input_layernorm.variance_epsilon
        self.num_heads: int = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_dim
        gains = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm] * self.num_heads + [attention.k_norm] * self.num_kv_heads
            gains = torch.stack([norm.weight for norm in norms])
        self.gains: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
        self.register_buffer("gains", gains, persistent=False)
        self.qkv_proj = _side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.gate_up_proj = _side_by_side(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden]: the first layer's are embeddings, others' are normed
        *,
        position_embeddings: torch.Tensor,  # [num_tokens, head_dim], from FusedRotary
        paged: StepContext,
        **_: Any,
    ) -> torch.Tensor:  # [1, num_tokens, hidden], normed
        kernels = self.kernels
        normed = hidden_states[0]
        if self.index == 0:
            paged.residual = normed
            normed = kernels.rms_norm(normed, self.input_norm.weight, self.eps)
        residual = paged.residual
        assert residual is not None
        attended = self._attend(normed, position_embeddings, paged)
        normed = kernels.add_rms_norm(attended, residual, self.mlp_norm.weight, self.eps)
        made = self.down_proj(kernels.swiglu(self.gate_up_proj(normed)))
        if paged.images is not None and self.has_deepstack_level:
            images = paged.images
            residual.add_(made)
            kernels.scatter_embeddings(residual, images.buffer, images.tokens, images.rows, self.index + 1)
            normed = kernels.rms_norm(residual, self.next_norm.weight, self.eps)
        else:
            normed = kernels.add_rms_norm(made, residual, self.next_norm.weight, self.eps)
        return normed.unsqueeze(0)

    def _attend(self, normed: torch.Tensor, angles: torch.Tensor, step: StepContext) -> torch.Tensor:
        kernels = self.kernels
        heads = self.qkv_proj(normed).unflatten(1, (-1, self.head_dim))
        rotated = heads[:, : self.num_heads + self.num_kv_heads]
        if self.gains is None:
            kernels.rotary(rotated, angles)
        else:
            kernels.norm_rotary(rotated, angles, self.gains, self.eps)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        out = kernels.attend(query, key, value, step.kv_cache[:, self.index], step.batch, self.scaling)
        made: torch.Tensor = self.o_proj(out.flatten(1))
        return made


class FusedRotary(nn.Module):
    """In the place of a rotary embedding module: positions -> `[num_tokens, head_dim]` float32 for `FusedLayer`."""

    def __init__(self, rotary: Any, axes: torch.Tensor, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.scaling = float(rotary.attention_scaling)
        self.inv_freq = nn.Buffer(rotary.inv_freq.float(), persistent=False)
        self.axes = nn.Buffer(axes.to(rotary.inv_freq.device), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        positions = position_ids.view(-1, position_ids.shape[-1])  # [num_position_rows, num_tokens]
        return self.kernels.mrope_angles(positions, self.inv_freq, self.axes, self.scaling)


def fuse_layers(language: Any, kernels: Kernels, axes: torch.Tensor, num_deepstack_levels: int) -> None:
    """Replace decoder layers, last norm and rotary embedding of a text model whose weights are loaded, in place.

    `axes` `[head_dim / 2]` int64: the row of the positions that each rotary frequency goes by.
    """
    layers = language.layers
    norms = [layer.input_layernorm for layer in layers] + [language.norm]
    for i, next_norm in enumerate(norms[1:]):
        layers[i] = FusedLayer(layers[i], next_norm, kernels, num_deepstack_levels)
    language.norm = nn.Identity()
    language.rotary_emb = FusedRotary(language.rotary_emb, axes, kernels)


def _side_by_side(*linears: nn.Linear) -> nn.Linear:
    """One linear layer that gives what all of them give, side by side."""
    with torch.device("meta"):
        made = nn.Linear(linears[0].in_features, sum(each.out_features for each in linears), bias=False)
    weights: list[torch.Tensor] = [each.weight for each in linears]
    made.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if any(each.bias is not None for each in linears):
        biases: list[torch.Tensor] = [
            each.weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in linears
        ]
        made.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return made
