"""What the kernels that move cache rows and embeddings must do, in plain PyTorch, on any device.

Signatures, shapes and effects are those of the functions without `_torch` (`kv_write.py`, `block_copy.py`,
`embedding_scatter.py`). No Triton is imported, so that a machine without it has these.
"""

from __future__ import annotations

import torch

_E4M3_MAX = 448.0


def kv_write_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    layer_cache: torch.Tensor,
    slots: torch.Tensor,
    cache_scales: torch.Tensor | None = None,
) -> None:
    """New keys and values into their slots; those of negative slots nowhere."""
    there = torch.nonzero(slots >= 0).flatten()
    block_size = layer_cache.shape[2]
    for i, x in enumerate((key, value)):
        made = x[there]
        if cache_scales is not None:
            made = (made.float() / cache_scales[i, :, None]).clamp(-_E4M3_MAX, _E4M3_MAX)
        layer_cache[slots[there] // block_size, i, slots[there] % block_size] = made.to(layer_cache.dtype)


def gather_blocks_torch(
    cache: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, checksums: torch.Tensor | None = None
) -> None:
    """`staging[i] = cache[block_ids[i]]`."""
    torch.index_select(cache, 0, block_ids, out=staging[: len(block_ids)])
    if checksums is not None:
        checksums.copy_(_sums(staging[: len(block_ids)]))


def scatter_blocks_torch(
    staging: torch.Tensor, block_ids: torch.Tensor, cache: torch.Tensor, checksums: torch.Tensor | None = None
) -> None:
    """`cache[block_ids[i]] = staging[i]`."""
    cache.index_copy_(0, block_ids, staging[: len(block_ids)])
    if checksums is not None:
        checksums.copy_(_sums(staging[: len(block_ids)]))


def _sums(rows: torch.Tensor) -> torch.Tensor:
    words = rows.view(torch.int32).long() & 0xFFFFFFFF
    weighted = words * torch.arange(1, words.shape[1] + 1, device=rows.device) & 0xFFFFFFFF
    sums = torch.stack((words.sum(1), weighted.sum(1)), dim=1) & 0xFFFFFFFF
    return torch.where(sums >= 1 << 31, sums - (1 << 32), sums).int()


def scatter_embeddings_torch(
    hidden: torch.Tensor, buffer: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, level: int
) -> None:
    """`hidden[tokens[i]]` is (level 0) or grows by (beyond) a level of `buffer[rows[i]]`."""
    width = hidden.shape[1]
    made = buffer[:, level * width : (level + 1) * width].index_select(0, rows)
    if level:
        hidden.index_add_(0, tokens, made)
    else:
        hidden.index_copy_(0, tokens, made)
