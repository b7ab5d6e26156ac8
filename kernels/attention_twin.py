"""Attention over the paged cache, as plain as it can be said: what the Triton kernels must compute.

`paged_prefill` and `paged_decode` (in the modules of these names) have the same signatures. Here every sequence's keys
and values are gathered and every score is made, on any device, in float32 or, for float64 queries, in float64. No
Triton is imported, so that a machine without it has these.

Which keys a token sees: those before `max(own position + 1, span end)` and, with a window, after `own position -
window`. `span_ends` is how an image's tokens see all of their image (transformers' mask of Gemma 3: window and (causal
or same image)); 0 stands for a token of text. A row of the cache that no token of its sequence sees is not read.
"""

from __future__ import annotations

import torch


def paged_prefill_torch(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    layer_cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], any strides
    block_table: torch.Tensor,  # [num_seqs, max_blocks] int; may hold anything beyond a sequence's blocks
    query_starts: torch.Tensor,  # [num_seqs + 1] int, places of the sequences' tokens in `query`
    seq_lens: torch.Tensor,  # [num_seqs] int, tokens in the cache, the new ones among them
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    span_ends: torch.Tensor | None = None,  # [num_tokens] int
    cache_scales: torch.Tensor | None = None,  # [2, num_kv_heads] float32: value = stored * scale
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """The new tokens of each sequence over all of it. Rows of `out` that belong to no sequence are left alone."""
    if out is None:
        out = torch.empty_like(query)
    dtype = torch.promote_types(query.dtype, torch.float32)
    block_size, num_kv_heads = layer_cache.shape[2:4]
    starts = query_starts.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[i], starts[i + 1]
        own = torch.arange(seq_len - (end - begin), seq_len, device=query.device)  # positions of the new tokens
        if not len(own):
            continue
        first_key = max(0, int(own[0]) - window + 1) if window else 0
        position = torch.arange(first_key, seq_len, device=query.device)
        block = block_table[i, position // block_size].long()
        cached = layer_cache[block, :, position % block_size].to(dtype)  # [num_keys, 2, num_kv_heads, head_dim]
        if cache_scales is not None:
            cached = cached * cache_scales.to(dtype)[:, :, None]
        key, value = cached.unbind(1)

        q = query[begin:end].to(dtype).unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("thgd,khd->hgtk", q, key) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        seen_end = own + 1
        if span_ends is not None:
            seen_end = torch.maximum(seen_end, span_ends[begin:end])
        seen = position < seen_end[:, None]
        if window:
            seen &= position > own[:, None] - window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out[begin:end] = torch.einsum("hgtk,khd->thgd", weights, value).flatten(1, 2).to(out.dtype)
    return out


def paged_decode_torch(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    layer_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    cache_scales: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    """One new token a sequence. A sequence of length 0 (the padding of a captured batch) gets zeros."""
    if out is None:
        out = torch.empty_like(query)
    out[seq_lens == 0] = 0
    there = torch.nonzero(seq_lens).flatten()
    out[there] = paged_prefill_torch(
        query[there],
        layer_cache,
        block_table[there],
        torch.arange(len(there) + 1, device=query.device),
        seq_lens[there],
        scale,
        soft_cap=soft_cap,
        window=window,
        cache_scales=cache_scales,
    )
    return out
