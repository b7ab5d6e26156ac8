"""Prefill attention over the paged cache: chunks of new tokens of several sequences, each over all of its sequence.

The batch is ragged: the sequences' tokens stand end to end. A program takes one *query tile*: some tokens of one
sequence times the query heads of one KV head, and goes over the cached keys that these tokens see. Sequences have
tiles of their own; the grid has room for one partly filled tile a sequence, a program finds its sequence by bisection,
and those for which there is none end at once. So nothing but shapes has to be known on the host.

Keys that all rows of a tile see are taken without masks; those around the diagonal, and all of them where there is a
window, with. Programs start with the last tiles, which see most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import attention_tile as tile
from kernels.attention_tile import attend_tile
from kernels.attention_twin import paged_prefill_torch

__all__ = ["paged_prefill", "paged_prefill_torch"]


@triton.jit
def prefill_kernel(
    query_ptr,
    cache_ptr,
    table_ptr,
    starts_ptr,
    seq_lens_ptr,
    span_ends_ptr,
    scales_ptr,
    out_ptr,
    num_seqs,
    score_factor,
    value_factor,
    strides,  # attention_tile.Strides
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPANS: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Grid (NUM_KV_HEADS, num_tokens // TOKENS + num_seqs)."""
    kv_head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)

    # The last sequence whose first tile is not after this one. Sequence i begins at tile starts[i] // TOKENS + i.
    seq = number * 0  # a number on the device, where 0 is one on the host
    beyond = num_seqs
    while beyond - seq > 1:
        middle = (seq + beyond) // 2
        if tl.load(starts_ptr + middle) // TOKENS + middle <= number:
            seq = middle
        else:
            beyond = middle
    start = tl.load(starts_ptr + seq)
    num_new = tl.load(starts_ptr + seq + 1) - start
    first_token = (number - start // TOKENS - seq) * TOKENS  # of this tile, within the sequence's new ones
    if (first_token >= 0) & (first_token < num_new):  # below 0: tokens of the batch that stand before all sequences
        seq_len = tl.load(seq_lens_ptr + seq)
        num_cached = seq_len - num_new
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM_PAD)
        token = first_token + row // GROUP
        there = (row < TOKENS * GROUP) & (token < num_new)
        head = kv_head * GROUP + row % GROUP
        flat = (start + token).to(tl.int64)
        stored = there[:, None] & (dim < HEAD_DIM)[None, :]
        q = tl.load(
            query_ptr + flat[:, None] * strides.query_token + head[:, None] * strides.query_head + dim[None, :],
            mask=stored,
            other=0,
        )
        if FP8 > 0:
            score_factor *= tl.load(scales_ptr + kv_head)
            value_factor *= tl.load(scales_ptr + NUM_KV_HEADS + kv_head)

        own = num_cached + token  # positions of the rows
        first_own = num_cached + first_token
        last_own = tl.minimum(first_own + TOKENS, seq_len) - 1
        seen_end = own + 1
        end = last_own + 1
        if SPANS:
            seen_end = tl.maximum(seen_end, tl.load(span_ends_ptr + flat, mask=there, other=0))
            end = tl.minimum(tl.max(tl.where(there, seen_end, 0), 0), seq_len)
        first = 0
        unmasked_end = (first_own + 1) // KEYS * KEYS
        if WINDOW > 0:
            first = tl.maximum(first_own - WINDOW + 1, 0)
            unmasked_end = first // KEYS * KEYS

        key_ptr = cache_ptr + kv_head * strides.head
        value_ptr = key_ptr + strides.value
        seq_table_ptr = table_ptr + seq.to(tl.int64) * strides.table
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if WINDOW == 0:
            for begin in range(0, unmasked_end, KEYS):
                position = begin + tl.arange(0, KEYS)
                acc, top, total = attend_tile(
                    q, key_ptr, value_ptr, seq_table_ptr, position, position, position, acc, top, total,
                    score_factor, strides, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, DIM_PAD, FP8, False,
                )  # fmt: skip
        for begin in range(unmasked_end, end, KEYS):
            position = begin + tl.arange(0, KEYS)
            wanted = (position >= first) & (position < end)
            seen = wanted[None, :] & (position[None, :] < seen_end[:, None])
            if WINDOW > 0:
                seen &= position[None, :] > own[:, None] - WINDOW
            acc, top, total = attend_tile(
                q, key_ptr, value_ptr, seq_table_ptr, position, wanted, seen, acc, top, total,
                score_factor, strides, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, DIM_PAD, FP8, True,
            )  # fmt: skip

        # Rows that stand for no token may have seen nothing.
        acc = acc * (value_factor / tl.where(total > 0, total, 1.0))[:, None]
        out = out_ptr + flat[:, None] * strides.out_token + head[:, None] * strides.out_head + dim[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=stored)


def paged_prefill(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    layer_cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], any strides but the last
    block_table: torch.Tensor,  # [num_seqs, max_blocks] int32; may hold anything beyond a sequence's blocks
    query_starts: torch.Tensor,  # [num_seqs + 1] int32, places of the sequences' tokens in `query`
    seq_lens: torch.Tensor,  # [num_seqs] int32, tokens in the cache, the new ones among them
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    span_ends: torch.Tensor | None = None,  # [num_tokens] int32: where the image ends that the token is of; 0 for text
    cache_scales: torch.Tensor | None = None,  # [2, num_kv_heads] float32 of an e4m3 cache: value = stored * scale
    out: torch.Tensor | None = None,  # [num_tokens, num_heads, head_dim]
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """The new tokens of each sequence, their keys and values in the cache already, over all that they see.

    Tokens before the first start and from the last on belong to no sequence; their rows of `out` are left alone.
    Of a span that ends beyond its sequence, what is in the cache is seen.

    Raises:
        ValueError: a shape, dtype or number that the kernel has not been made for.
    """
    tile.check(query, layer_cache, block_table, seq_lens, soft_cap, window, cache_scales)
    num_tokens, num_heads, head_dim = query.shape
    num_seqs = len(seq_lens)
    if len(query_starts) != num_seqs + 1:
        raise ValueError(f"{len(query_starts)} starts for {num_seqs} sequences; one more is needed")
    if span_ends is not None and len(span_ends) != num_tokens:
        raise ValueError(f"{len(span_ends)} ends of spans for {num_tokens} tokens")
    if out is None:
        out = torch.empty_like(query)
    if not num_tokens:
        return out
    layer_cache, fp8 = tile.prepare_cache(layer_cache)
    num_kv_heads = layer_cache.shape[3]
    group = num_heads // num_kv_heads
    rows, keys, num_warps, num_stages = _tiling(head_dim, query.dtype, -(-num_tokens // num_seqs) * group)
    rows = max(rows, triton.next_power_of_2(group))
    tokens = rows // group
    prefill_kernel[(num_kv_heads, num_tokens // tokens + num_seqs)](
        query,
        layer_cache,
        block_table,
        query_starts,
        seq_lens,
        seq_lens if span_ends is None else span_ends,
        seq_lens if cache_scales is None else cache_scales,
        out,
        num_seqs,
        tile.score_factor(scale, soft_cap, fp8),
        tile.value_factor(fp8),
        tile.Strides.of(query, out, block_table, layer_cache),
        **tile.constants(query, layer_cache, soft_cap, window, fp8),
        SPANS=span_ends is not None,
        ROWS=rows,
        TOKENS=tokens,
        KEYS=keys,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def _tiling(head_dim: int, dtype: torch.dtype, mean_rows: int) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and pipeline stages: the largest that compile without spilled registers.

    The matrix units of sm_90 take warpgroups of 64 rows, with operands in shared memory; elsewhere operands take
    registers. float32 has no matrix units at full precision. Two stages are the block table's; the others hold tiles.
    """
    backend, arch = tile.target()
    if dtype is torch.float32:
        return (32, 32, 4, 2) if backend == "interpreter" else (16, 16, 4, 2)
    if mean_rows <= 32:
        return 32, 64 if head_dim <= 128 else 32, 4, 2
    if head_dim > 128:
        return (128, 32, 8, 2) if (backend, arch) == ("cuda", "90") else (64, 32, 8, 2)
    if backend == "cuda" and int(arch) < 90:
        return 128, 64 if head_dim <= 64 else 32, 8, 5
    if backend == "hip":
        return 128, 64, 8, 2
    return 128, 64, 8, 5
