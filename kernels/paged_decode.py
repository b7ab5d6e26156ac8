"""Decode attention over the paged cache: one new token a sequence.

Every cached key and value is read once, so the kernel is as fast as memory if enough of it is asked for at a time.

- The query heads of a KV head are the rows of one tile, so that the group shares each load.
- A sequence is cut into splits, each a program of its own, where sequences and heads alone are too few to fill the
  device. Splits leave their part's result and its weight (log2 of the sum of exponentials); a second kernel adds them
  up. This is FlashDecoding (Dao et al., 2023). With one split the first kernel writes the result.

Nothing is read back to the host, and the grid depends on shapes and `max_seq_len` alone, so a call can be captured in a
CUDA graph and replayed with other lengths and blocks.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels import attention_tile as tile
from kernels.attention_tile import attend_tile
from kernels.attention_twin import paged_decode_torch

__all__ = ["paged_decode", "paged_decode_torch"]

_MAX_SPLITS = 128
#: A split costs about as much as so many tiles besides its own: its start, its part written and read again.
_SPLIT_COST_TILES = 2
#: Nor has a split more than so many, 2048 tokens: a sequence much longer than the others would run on alone.
_MAX_TILES = 32
#: Without a device to ask: the multiprocessors of an H200.
_DEFAULT_NUM_PROCESSORS = 132
#: Programs that a multiprocessor holds at a time: shared memory for the pipelined tiles of two fits.
_PROGRAMS_PER_PROCESSOR = 2


@triton.jit
def decode_split_kernel(
    query_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    scales_ptr,
    out_ptr,  # [num_seqs, num_heads, HEAD_DIM] where NUM_SPLITS is 1
    part_ptr,  # [num_seqs, num_heads, NUM_SPLITS, HEAD_DIM] float32
    weight_ptr,  # [num_seqs, num_heads, NUM_SPLITS] float32
    score_factor,
    value_factor,
    strides,  # attention_tile.Strides
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Grid (num_seqs, NUM_KV_HEADS, NUM_SPLITS)."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + row
    stored = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(
        query_ptr + seq * strides.query_token + head[:, None] * strides.query_head + dim[None, :], mask=stored, other=0
    )
    if FP8 > 0:
        score_factor *= tl.load(scales_ptr + kv_head)
        value_factor *= tl.load(scales_ptr + NUM_KV_HEADS + kv_head)

    seq_len = tl.load(seq_lens_ptr + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    first_tile = first // KEYS
    tiles_per_split = tl.cdiv(tl.cdiv(seq_len, KEYS) - first_tile, NUM_SPLITS)
    begin = (first_tile + split * tiles_per_split) * KEYS
    end = tl.minimum(begin + tiles_per_split * KEYS, seq_len)

    key_ptr = cache_ptr + kv_head * strides.head
    value_ptr = key_ptr + strides.value
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        wanted = position < end
        if WINDOW > 0:
            wanted &= position >= first
        acc, top, total = attend_tile(
            q, key_ptr, value_ptr, table_ptr + seq * strides.table, position, wanted, wanted[None, :], acc, top, total,
            score_factor, strides, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, DIM_PAD, FP8, True,
        )  # fmt: skip

    # A split without keys, of a short sequence or of one of length 0, has weight 0 and the result 0.
    total = tl.where(total > 0, total, 1.0)
    acc = acc * (value_factor / total)[:, None]
    if NUM_SPLITS == 1:
        out = out_ptr + seq * strides.out_token + head[:, None] * strides.out_head + dim[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        part = (seq * NUM_KV_HEADS * GROUP + head) * NUM_SPLITS + split
        tl.store(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], acc, mask=stored)
        tl.store(weight_ptr + part, top + tl.log2(total), mask=row < GROUP)


@triton.jit
def decode_reduce_kernel(
    part_ptr,
    weight_ptr,
    out_ptr,
    stride_out_token,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Adds up the splits. Grid (num_seqs, num_heads)."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = (seq * tl.num_programs(1) + head) * NUM_SPLITS
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, DIM_PAD)
    weight = tl.load(weight_ptr + first + split, mask=split < NUM_SPLITS, other=float("-inf"))
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    part = tl.load(
        part_ptr + (first + split)[:, None] * HEAD_DIM + dim[None, :],
        mask=(split < NUM_SPLITS)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0,
    )
    total = tl.sum(weight, 0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    out = out_ptr + seq * stride_out_token + head * stride_out_head + dim
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def paged_decode(
    query: torch.Tensor,  # [num_seqs, num_heads, head_dim]
    layer_cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], any strides but the last
    block_table: torch.Tensor,  # [num_seqs, max_blocks] int32; may hold anything beyond a sequence's blocks
    seq_lens: torch.Tensor,  # [num_seqs] int32, tokens in the cache, the new one among them
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    cache_scales: torch.Tensor | None = None,  # [2, num_kv_heads] float32 of an e4m3 cache: value = stored * scale
    max_seq_len: int
    | None = None,  # no sequence is longer; a hint for the number of splits. Default: the table's width
    out: torch.Tensor | None = None,  # [num_seqs, num_heads, head_dim]
) -> torch.Tensor:  # [num_seqs, num_heads, head_dim]
    """One new token a sequence, its key and value in the cache already. A sequence of length 0 gets zeros.

    Raises:
        ValueError: a shape, dtype or number that the kernel has not been made for.
    """
    tile.check(query, layer_cache, block_table, seq_lens, soft_cap, window, cache_scales)
    num_seqs, num_heads, head_dim = query.shape
    if len(seq_lens) != num_seqs:
        raise ValueError(f"{num_seqs} queries for {len(seq_lens)} sequences of one new token each")
    if out is None:
        out = torch.empty_like(query)
    if not num_seqs:
        return out
    layer_cache, fp8 = tile.prepare_cache(layer_cache)
    block_size, num_kv_heads = layer_cache.shape[2:4]
    dim_pad = tile.pad(head_dim)
    keys = _num_keys(dim_pad, query.dtype)
    longest = block_table.shape[1] * block_size if max_seq_len is None else max_seq_len
    if window:
        longest = min(longest, window + keys)
    num_splits = choose_num_splits(
        num_seqs * num_kv_heads, -(-longest // keys), _num_processors(query.device) * _PROGRAMS_PER_PROCESSOR
    )
    part = weight = out
    if num_splits > 1:
        part = torch.empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=query.device)
        weight = torch.empty(num_seqs, num_heads, num_splits, dtype=torch.float32, device=query.device)
    decode_split_kernel[(num_seqs, num_kv_heads, num_splits)](
        query,
        layer_cache,
        block_table,
        seq_lens,
        seq_lens if cache_scales is None else cache_scales,
        out,
        part,
        weight,
        tile.score_factor(scale, soft_cap, fp8),
        tile.value_factor(fp8),
        tile.Strides.of(query, out, block_table, layer_cache),
        **tile.constants(query, layer_cache, soft_cap, window, fp8),
        NUM_SPLITS=num_splits,
        ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        KEYS=keys,
        num_warps=4,
        num_stages=_num_stages(),
    )
    if num_splits > 1:
        decode_reduce_kernel[(num_seqs, num_heads)](
            part,
            weight,
            out,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            SPLITS_PAD=triton.next_power_of_2(num_splits),
            DIM_PAD=dim_pad,
            num_warps=4,
        )
    return out


def _num_keys(dim_pad: int, dtype: torch.dtype) -> int:
    """Of a tile. float32 has no matrix units at full precision, and its larger tiles spill registers."""
    if dtype is torch.float32 and tile.target()[0] != "interpreter":
        return 16
    return 64 if dim_pad * dtype.itemsize <= 256 else 32


def _num_stages() -> int:
    """Of the software pipeline: the table's entry, then keys and values, two tiles of them under way, then the use.

    AMD's 64 KiB of shared memory hold one.
    """
    return 2 if tile.target()[0] == "hip" else 5


@functools.cache
def choose_num_splits(num_programs: int, num_tiles: int, num_places: int) -> int:
    """Of how many splits a sequence of `num_tiles` is, where `num_places` programs run at a time.

    The least number of rounds times tiles a round; at equal cost the fewest splits. Programs of one round run side by
    side, and a round with a few programs takes as long as a full one.
    """

    def cost(splits: int) -> int:
        rounds = -(-num_programs * splits // num_places)
        return rounds * (-(-num_tiles // splits) + (_SPLIT_COST_TILES if splits > 1 else 0))

    most = max(1, min(_MAX_SPLITS, num_tiles))
    fewest = min(-(-num_tiles // _MAX_TILES), most)
    return min(range(max(1, fewest), most + 1), key=lambda splits: (cost(splits), splits))


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_NUM_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
