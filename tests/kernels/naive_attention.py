"""The twin that `kernels.paged_attention` is held against: one query token and one head at a time, in float64."""

from __future__ import annotations

import math

import torch


def naive_paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], the new tokens'
    value: torch.Tensor,
    layer_cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim]; written to
    query_lens: list[int],
    seq_lens: list[int],
    block_table: list[list[int]],
    scale: float,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim] float64
    """Each sequence's blocks are read row by row; no row beyond the sequence's end is touched."""
    block_size, num_kv_heads = layer_cache.shape[2:4]
    group = query.shape[1] // num_kv_heads
    out = torch.empty(query.shape, dtype=torch.float64)
    start = 0
    for num_new, seq_len, blocks in zip(query_lens, seq_lens, block_table, strict=True):
        for i in range(num_new):
            place = seq_len - num_new + i
            layer_cache[blocks[place // block_size], 0, place % block_size] = key[start + i]
            layer_cache[blocks[place // block_size], 1, place % block_size] = value[start + i]
        rows = [(blocks[j // block_size], j % block_size) for j in range(seq_len)]
        keys = torch.stack([layer_cache[block, 0, row] for block, row in rows]).double()
        values = torch.stack([layer_cache[block, 1, row] for block, row in rows]).double()
        for i in range(num_new):
            seen = seq_len - num_new + i + 1
            for head in range(query.shape[1]):
                scores = keys[:seen, head // group] @ query[start + i, head].double() * scale
                weights = [math.exp(score - float(scores.max())) for score in scores.tolist()]
                total = torch.tensor(weights, dtype=torch.float64)
                out[start + i, head] = (total / total.sum()) @ values[:seen, head // group]
        start += num_new
    return out
