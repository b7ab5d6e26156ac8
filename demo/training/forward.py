"""The model's forward pass for training: transformers' own modules, a batch at a time.

transformers' vision tower takes all patches of all pictures in one row and attends picture by picture in a Python loop.
Here the pictures of a call have one size, and are a batch. A test holds both ways against each other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.models.qwen3_vl.modeling_qwen3_vl import rotate_half
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

#: Rows and columns of a picture in patches.
GridSize = tuple[int, int]


_ATTENTION = "batched"


class BatchedModel(nn.Module):
    """Wraps a Qwen3-VL model; holds no weights of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.model.language_model.config._attn_implementation = _ATTENTION
        self._places = functools.cache(self._make_places)

    def see(self, patches: torch.Tensor, grid: GridSize) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The vision tower.

        Args:
            patches: of pictures of one size, without the second time step, which repeats the first.
                # [num_pictures, num_patches, channels * patch * patch]

        Returns:
            Embeddings and deepstack features.  # [num_pictures, num_patches / 4, text_hidden]
        """
        tower = self.model.model.visual
        num_pictures, num_patches, _ = patches.shape
        indices, weights, cos, sin = self._places(grid)
        kernel = tower.patch_embed.proj
        # Both time steps see the same pixels.
        x = F.linear(patches, kernel.weight.sum(2).flatten(1), kernel.bias)
        x = x + (tower.pos_embed(indices) * weights[:, :, None]).sum(1).to(x.dtype)
        levels = []
        for number, block in enumerate(tower.blocks):
            x = x + self._attend(block.attn, block.norm1(x), cos, sin)
            x = x + block.mlp(block.norm2(x))
            if number in tower.deepstack_visual_indexes:
                merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(number)]
                levels.append(merger(x.reshape(-1, x.shape[-1])).view(num_pictures, num_patches // 4, -1))
        return tower.merger(x.reshape(-1, x.shape[-1])).view(num_pictures, num_patches // 4, -1), levels

    def read(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        visual_places: torch.Tensor,
        visual: tuple[torch.Tensor, Sequence[torch.Tensor]] | None,
    ) -> list[torch.Tensor]:
        """The language model's hidden states after each of its layers, deepstack not yet added; the last
        ones are normalized.

        # [batch, length, hidden] each

        Args:
            token_ids: # [batch, length]
            position_ids: of time, height and width.  # [3, batch, length]
            mask: who attends to whom.  # [batch, 1, length, length], bool
            visual_places: where in each sequence the pictures' embeddings stand.  # [num_embeds]
            visual: embeddings and deepstack features; None without pictures.  # [batch, num_embeds, hidden]
        """
        text = self.model.model.language_model
        x = text.embed_tokens(token_ids)
        levels: Sequence[torch.Tensor] = ()
        if visual is not None:
            embeds, levels = visual
            x = x.index_copy(1, visual_places, embeds.to(x.dtype))
        positions = text.rotary_emb(x, position_ids)
        states: list[torch.Tensor] = []
        for number, layer in enumerate(text.layers):
            x = layer(x, attention_mask=mask, position_embeddings=positions)
            states.append(x)
            if number < len(levels):
                x = x.index_add(1, visual_places, levels[number].to(x.dtype))
        states[-1] = text.norm(x)
        return states

    def _attend(self, attention: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = attention.qkv(x).view(batch, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (t * cos.to(t.dtype) + rotate_half(t) * sin.to(t.dtype) for t in (q, k))
        made = _weigh(q * q.shape[-1] ** -0.5, k, v, None)
        out: torch.Tensor = attention.proj(made.transpose(1, 2).reshape(batch, length, hidden))
        return out

    def _make_places(self, grid: GridSize) -> tuple[torch.Tensor, ...]:
        tower = self.model.model.visual
        device = tower.pos_embed.weight.device
        one = torch.tensor([[1, *grid]], device=device)
        indices, weights = get_vision_interpolation_indices_and_weights(
            one,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=2,
            kwargs={},
        )
        places = get_vision_position_ids(one, 2, kwargs={})
        cos, sin = tower.rotary_pos_emb(weights, places)
        return indices, weights.float(), cos, sin


def _weigh(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention by plain matrix products: on a CPU its backward pass is far quicker than the fused one's."""
    scores = q @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1, dtype=scores.dtype) @ v


def _attend_grouped(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: several query heads share a key head."""
    batch, heads, length, width = query.shape
    groups = module.num_key_value_groups
    q = (query * scaling).view(batch, heads // groups, groups, length, width)
    made = _weigh(q, key.unsqueeze(2), value.unsqueeze(2), mask.unsqueeze(2))
    return made.view(batch, heads, length, width).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attend_grouped)
