"""What every layer of a step is told, and our paged attention in transformers' attention registry.

A text model built with `_attn_implementation = "triptych_paged"` has no mask built by transformers, since there is no
entry in the mask registry, and passes the keyword arguments of its own `forward` on to its layers; `paged=` carries a
`StepContext`. The supported families' layers are replaced at load (`fused_layers.py`) and attend by themselves. A
decoder layer of another form stays transformers' own, and calls `_attention` by way of the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.dispatch import Kernels

#: The name under which `_attention` stands in the registry.
ATTENTION_NAME = "triptych_paged"


@dataclass(slots=True)
class ImageRows:
    """Where the step's image embeddings are, and which tokens they stand for."""

    buffer: torch.Tensor  # [num_rows, hidden * (1 + deepstack levels)], the encoder buffer
    tokens: torch.Tensor  # [n] int64, places in the flattened batch
    rows: torch.Tensor  # [n] int64, of the buffer


@dataclass(slots=True)
class StepContext:
    """One step, as every layer sees it."""

    kernels: Kernels
    kv_cache: torch.Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    batch: Any  # what `kernels.plan` made
    images: ImageRows | None = None
    #: What the layers done so far add up to, `[num_tokens, hidden]`. Fused layers pass the next one's normed input on
    #: through transformers' loop, and this beside it.
    residual: torch.Tensor | None = None


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: StepContext,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = paged.kernels.attend(
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
