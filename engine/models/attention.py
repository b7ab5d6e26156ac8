"""Our paged attention in transformers' attention registry.

A text model built with `_attn_implementation = "triptych_paged"` calls `_attention` in every layer and passes on the
keyword arguments of its own `forward`; `paged=` carries the step's plan and the cache. There is no entry in the mask
registry, so transformers builds no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.models.adapter import ATTENTION_NAME
from kernels.paged_attention import AttentionBatch, paged_attention


@dataclass(slots=True)
class PagedContext:
    """What every layer of one step needs."""

    kv_cache: torch.Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    batch: AttentionBatch


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedContext,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        paged.kv_cache[:, layer],
        paged.batch,
        scaling,
    )
    return out.unsqueeze(0), None


def register() -> None:
    """Enter it into the registry. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
