"""Attention over a paged, block-major KV cache: the PyTorch implementation, which also serves the CPU.

The cache is one tensor `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, so that one block of all
layers is contiguous and moves between engines in one copy. A layer sees it through strided views.

A batch is flattened: the tokens of all requests stand end to end, requests with a single query token (decodes) first.
`AttentionBatch` says where each token's slot is and which sequences are attended to together; it is built once a step
and used by every layer. What a layer does:

1. write the new keys and values into their slots;
2. decodes: sequences of similar length are gathered into one padded batch and attended to in one call, with the query
   heads of a group viewed as query rows of their KV head (one read of K and V for the whole group; bf16 SDPA with a
   single row takes several times as long). A sequence within one block is a view, no gather;
3. prefill chunks, one call a sequence: a chunk with nothing before it attends to the new keys and values themselves, no
   gather; a later chunk gathers its blocks.

Rows of a block beyond the end of a sequence may hold anything, NaN included: they are zeroed in the gathered copy and
masked. The masked positions carry weight zero, and zero times NaN is NaN, so masking alone would not do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kernels.token_places import token_places

#: Decodes share a padded call while the longest has at most this many times the blocks of the shortest, plus two.
_PADDING_RATIO = 1.25


@dataclass(slots=True)
class DecodeGroup:
    """Sequences with one query token each, attended to in one call."""

    rows: torch.Tensor  # [num_seqs] int64, the tokens' places in the flattened batch
    block_ids: torch.Tensor  # [num_seqs * max_blocks] int64, padded with each sequence's first block
    mask: torch.Tensor | None  # [num_seqs, 1, 1, max_len] additive; None where every slot counts
    padding: torch.Tensor | None  # flat indices of the slots that do not count
    num_seqs: int
    max_len: int


@dataclass(slots=True)
class PrefillChunk:
    """A sequence with several query tokens."""

    start: int  # first token's place in the flattened batch
    num_tokens: int
    num_cached: int  # tokens of the sequence before this chunk
    block_ids: torch.Tensor  # [num_blocks] int64; unused where num_cached is 0
    mask: torch.Tensor | None  # [num_tokens, num_cached + num_tokens] bool; None where num_cached is 0


@dataclass(slots=True)
class AttentionBatch:
    """One step's flattened batch, as every layer sees it."""

    block_index: torch.Tensor  # [num_tokens] int64, the block of each new token
    block_offset: torch.Tensor  # [num_tokens] int64, its row within the block
    decodes: list[DecodeGroup] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)


def _decode_groups(
    num_decodes: int,
    seq_lens: NDArray[np.int64],
    block_table: NDArray[np.int64],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[DecodeGroup]:
    lens = seq_lens[:num_decodes]
    num_blocks = -(-lens // block_size)
    order = np.argsort(num_blocks, kind="stable")
    groups: list[DecodeGroup] = []
    begin = 0
    while begin < num_decodes:
        limit = num_blocks[order[begin]] * _PADDING_RATIO + 2
        end = begin + 1
        while end < num_decodes and num_blocks[order[end]] <= limit:
            end += 1
        rows = order[begin:end]
        width = int(num_blocks[rows[-1]])
        max_len = int(lens[rows].max())
        table = block_table[rows, :width].copy()
        beyond = np.arange(width)[None, :] >= num_blocks[rows][:, None]
        table = np.where(beyond, table[:, :1], table)
        invalid = np.arange(width * block_size)[None, :] >= lens[rows][:, None]
        counted = invalid[:, :max_len]
        mask = None
        if counted.any():
            mask = torch.zeros(counted.shape, dtype=dtype)
            mask.masked_fill_(torch.from_numpy(counted), float("-inf"))
            mask = mask[:, None, None, :].to(device)
        padding = torch.from_numpy(np.flatnonzero(invalid)).to(device) if invalid.any() else None
        groups.append(
            DecodeGroup(
                rows=torch.from_numpy(rows).to(device),
                block_ids=torch.from_numpy(table.reshape(-1)).to(device),
                mask=mask,
                padding=padding,
                num_seqs=len(rows),
                max_len=max_len,
            )
        )
        begin = end
    return groups


def build_attention_batch(
    query_lens: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    block_table: NDArray[np.int64],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBatch:
    """Plan one step. All arrays are on the host.

    `query_lens` `[num_seqs]`: new tokens of each sequence, those with one token and something before it first.
    `seq_lens` `[num_seqs]`: tokens in the cache after this step. `block_table` `[num_seqs, max_blocks]`.
    """
    places = token_places(query_lens, seq_lens, block_table, block_size)
    num_decodes = places.num_decodes
    chunks = []
    for i in range(num_decodes, len(query_lens)):
        num_tokens, seq_len = int(query_lens[i]), int(seq_lens[i])
        num_cached = seq_len - num_tokens
        mask = None
        block_ids = block_table[i, :0]
        if num_cached:
            block_ids = block_table[i, : -(-seq_len // block_size)]
            mask = torch.ones(num_tokens, seq_len, dtype=torch.bool, device=device).tril_(num_cached)
        chunks.append(
            PrefillChunk(
                start=int(places.starts[i]),
                num_tokens=num_tokens,
                num_cached=num_cached,
                block_ids=torch.from_numpy(np.ascontiguousarray(block_ids)).to(device),
                mask=mask,
            )
        )
    return AttentionBatch(
        block_index=torch.from_numpy(places.blocks).to(device),
        block_offset=torch.from_numpy(places.rows).to(device),
        decodes=_decode_groups(num_decodes, seq_lens, block_table, block_size, dtype, device) if num_decodes else [],
        chunks=chunks,
    )


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], the new tokens'
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    layer_cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], any strides; written to
    batch: AttentionBatch,
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    span_ends: torch.Tensor | None = None,  # [num_tokens], see paged_prefill
    cache_scales: torch.Tensor | None = None,  # [2, num_kv_heads] of an e4m3 cache
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Write the new keys and values, then attend to everything that each token may see (causal).

    Raises:
        ValueError: one of the last four, which only Triton's kernels have, is asked for.
    """
    asked = {"soft_cap": soft_cap, "window": window, "span_ends": span_ends, "cache_scales": cache_scales}
    for name, given in asked.items():
        if isinstance(given, torch.Tensor) or given:
            shown = tuple(given.shape) if isinstance(given, torch.Tensor) else given
            raise ValueError(f"attention by PyTorch's operators has no {name} ({shown}); Triton's kernels have")
    keys, values = layer_cache[:, 0], layer_cache[:, 1]
    keys[batch.block_index, batch.block_offset] = key
    values[batch.block_index, batch.block_offset] = value

    out = torch.empty_like(query)
    for group in batch.decodes:
        out[group.rows] = _attend_decodes(query[group.rows], keys, values, group, scale)
    for chunk in batch.chunks:
        end = chunk.start + chunk.num_tokens
        if chunk.num_cached:
            seq_len = chunk.num_cached + chunk.num_tokens
            k = keys[chunk.block_ids].flatten(0, 1)[:seq_len]
            v = values[chunk.block_ids].flatten(0, 1)[:seq_len]
        else:
            k, v = key[chunk.start : end], value[chunk.start : end]
        out[chunk.start : end] = _attend_chunk(query[chunk.start : end], k, v, chunk.mask, scale)
    return out


def _attend_decodes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: DecodeGroup, scale: float
) -> torch.Tensor:
    num_kv_heads, head_dim = keys.shape[-2:]
    if len(group.block_ids) == 1:
        block = int(group.block_ids[0])
        k = keys[block, : group.max_len].unsqueeze(0)
        v = values[block, : group.max_len].unsqueeze(0)
    else:
        k = keys.index_select(0, group.block_ids).view(group.num_seqs, -1, num_kv_heads, head_dim)
        v = values.index_select(0, group.block_ids).view(group.num_seqs, -1, num_kv_heads, head_dim)
        if group.padding is not None:
            k.flatten(0, 1).index_fill_(0, group.padding, 0.0)
            v.flatten(0, 1).index_fill_(0, group.padding, 0.0)
        k, v = k[:, : group.max_len], v[:, : group.max_len]
    q = query.unflatten(1, (num_kv_heads, -1))  # [num_seqs, num_kv_heads, group, head_dim]
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=group.mask, scale=scale)
    return out.flatten(1, 2)


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    num_kv_heads = key.shape[1]
    group = query.shape[1] // num_kv_heads
    # KV heads as the batch, the query heads of each as heads: K and V are repeated by a stride of zero, not copied.
    q = query.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)  # [num_kv_heads, group, num_tokens, head_dim]
    k = key.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    v = value.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2)
