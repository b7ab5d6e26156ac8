"""What the two attention kernels share: one tile of cached keys and values, and one step of the online softmax.

A *tile* is `[rows, keys]`: the rows are query heads that share a KV head (of one token in decode, of several in
prefill), so that each key is read once for all of them. Scores are kept in units of log2, since `exp2` is what the
hardware has. The softmax is the online one (Milakov and Gimelshein, 2018), tiled as in FlashAttention (Dao, 2022).

Keys that a row does not see get weight zero. Zero times NaN is NaN, and unused rows of the cache may hold NaN, so a key
that no row of a tile sees is not loaded: zeros stand for it.

fp8 caches hold e4m3 with a scale per KV head, for keys and for values. The scale goes into the scores and into the
result, not into the tile. Where the hardware does not convert e4m3 (NVIDIA before 8.9, the interpreter) its bits are
moved into a float16 whose value is 256 times too small, which is exact for all finite values, subnormal ones too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.limits import DTYPES, MAX_GROUP, MAX_HEAD_DIM, named

#: Values of the kernels' FP8.
NO_FP8, NATIVE_FP8, FP8_BITS = 0, 1, 2
#: What 1 / the stored value of FP8_BITS is off by.
_BITS_SCALE = 256.0
LOG2_E = 1.4426950408889634


class Strides(NamedTuple):
    """Elements from one to the next, in the tensors of both kernels. One argument of theirs."""

    query_token: int
    query_head: int
    out_token: int
    out_head: int
    table: int  # from one sequence's blocks to the next one's
    block: int
    value: int  # from a block's keys to its values
    row: int  # of a block
    head: int

    @classmethod
    def of(cls, query: torch.Tensor, out: torch.Tensor, table: torch.Tensor, layer_cache: torch.Tensor) -> Strides:
        block, value, row, head, _ = layer_cache.stride()
        return cls(
            query.stride(0), query.stride(1), out.stride(0), out.stride(1), table.stride(0), block, value, row, head
        )


@triton.jit
def load_tile(
    cache_ptr,  # of this layer and KV head, keys or values
    table_ptr,  # the sequence's blocks
    position,  # [keys]
    wanted,  # [keys] bool
    strides,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    FP8: tl.constexpr,
    MASKED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Rows of the paged cache as `[keys, DIM_PAD]` of `dtype`; zeros where none is wanted. All are, unless MASKED."""
    dim = tl.arange(0, DIM_PAD)
    if MASKED:
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=wanted, other=0)
    else:
        block = tl.load(table_ptr + position // BLOCK_SIZE)
    zero = 0 if FP8 == 2 else 0.0
    row_ptr = cache_ptr + block.to(tl.int64) * strides.block + (position % BLOCK_SIZE) * strides.row
    ptr = row_ptr[:, None] + dim[None, :]
    if MASKED:
        if HEAD_DIM == DIM_PAD:
            tile = tl.load(ptr, mask=wanted[:, None], other=zero)
        else:
            tile = tl.load(ptr, mask=wanted[:, None] & (dim < HEAD_DIM)[None, :], other=zero)
    elif HEAD_DIM == DIM_PAD:
        tile = tl.load(ptr)
    else:
        tile = tl.load(ptr, mask=(dim < HEAD_DIM)[None, :], other=zero)
    if FP8 == 2:
        bits = tile.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        tile = half.to(tl.float16, bitcast=True)
    return tile.to(dtype)


#: The interpreter multiplies with numpy, which has no bfloat16: it would take the bits for integers.
_WIDEN = tl.constexpr(not isinstance(load_tile, triton.JITFunction))


@triton.jit
def product(a, b, acc):
    """`a @ b + acc`, in float32. "ieee": float32 operands are not cut to tf32; shorter ones know no difference."""
    if _WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def attend_tile(
    q,  # [rows, DIM_PAD]
    key_ptr,
    value_ptr,
    table_ptr,
    position,  # [keys]
    wanted,  # [keys] bool: loaded
    seen,  # [rows, keys] bool: counted
    acc,  # [rows, DIM_PAD] float32, and so on
    top,  # [rows], largest score so far, in units of log2
    total,  # [rows], sum of the weights so far
    score_scale,  # from products to units of log2, or with a soft cap to its argument
    strides,
    SOFT_CAP: tl.constexpr,  # in units of log2; 0 for none
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    FP8: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax: `acc`, `top` and `total` with this tile's keys in them."""
    key = load_tile(
        key_ptr, table_ptr, position, wanted, strides, BLOCK_SIZE, HEAD_DIM, DIM_PAD, FP8, MASKED, q.dtype,
    )  # fmt: skip
    score = product(q, tl.trans(key), None) * score_scale
    if SOFT_CAP > 0:
        # cap * tanh(x / cap): exact at both ends, where exp2 gives 0 or infinity. score_scale is 2 log2(e) / cap.
        score = SOFT_CAP * (1 - 2 / (tl.exp2(score) + 1))
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # A row that has seen nothing yet: -inf minus -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(top - base)
    value = load_tile(
        value_ptr, table_ptr, position, wanted, strides, BLOCK_SIZE, HEAD_DIM, DIM_PAD, FP8, MASKED, q.dtype,
    )  # fmt: skip
    acc = product(weight.to(q.dtype), value, acc * fade[:, None])
    return acc, new_top, total * fade + tl.sum(weight, 1)


def score_factor(scale: float, soft_cap: float, fp8: int) -> float:
    """`score_scale` of `attend_tile`, before the scale of the keys."""
    factor = 2 * scale / soft_cap if soft_cap else scale
    return factor * LOG2_E * (_BITS_SCALE if fp8 == FP8_BITS else 1.0)


def value_factor(fp8: int) -> float:
    """What the result is to be multiplied with, before the scale of the values."""
    return _BITS_SCALE if fp8 == FP8_BITS else 1.0


def constants(query: torch.Tensor, layer_cache: torch.Tensor, soft_cap: float, window: int, fp8: int) -> dict[str, Any]:
    """What both kernels are compiled for."""
    (_, num_heads, head_dim), (block_size, num_kv_heads) = query.shape, layer_cache.shape[2:4]
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "SOFT_CAP": soft_cap * LOG2_E,
        "WINDOW": window,
        "FP8": fp8,
        "DIM_PAD": pad(head_dim),
    }


def pad(head_dim: int) -> int:
    """Columns of a tile: the matrix units take no fewer than 16."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def prepare_cache(layer_cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The cache as the kernels load it, and their FP8."""
    if layer_cache.dtype is not torch.float8_e4m3fn:
        return layer_cache, NO_FP8
    if _converts_e4m3():
        return layer_cache, NATIVE_FP8
    return layer_cache.view(torch.uint8), FP8_BITS


@functools.cache
def target() -> tuple[str, str]:
    """What Triton compiles for: ("cuda", "90"), ("hip", "gfx942"); ("interpreter", "") where it does not."""
    if not isinstance(load_tile, triton.JITFunction):
        return "interpreter", ""
    found = triton.runtime.driver.active.get_current_target()
    return str(found.backend), str(found.arch)


def _converts_e4m3() -> bool:
    """Whether the hardware has an instruction for it."""
    backend, arch = target()
    return backend == "cuda" and int(arch) >= 89


def check(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    soft_cap: float,
    window: int,
    cache_scales: torch.Tensor | None,
) -> None:
    """Refuse what the kernels would compute wrongly.

    Raises:
        ValueError: with the shape, dtype or number that is refused, and the limit.
    """
    if query.ndim != 3 or layer_cache.ndim != 5 or layer_cache.shape[1] != 2:
        raise ValueError(
            "attention takes queries [num_tokens, num_heads, head_dim] and a cache [num_blocks, 2, block_size, "
            f"num_kv_heads, head_dim], not {tuple(query.shape)} and {tuple(layer_cache.shape)}"
        )
    (_, num_heads, head_dim), num_kv_heads = query.shape, layer_cache.shape[3]
    if layer_cache.shape[4] != head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"queries {tuple(query.shape)} do not fit a cache {tuple(layer_cache.shape)}: head sizes must be equal and "
            "heads a multiple of KV heads"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM or num_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"attention over heads of {head_dim} (at most {MAX_HEAD_DIM}), {num_heads // num_kv_heads} to a KV head "
            f"(at most {MAX_GROUP}): queries {tuple(query.shape)}, cache {tuple(layer_cache.shape)}"
        )
    if query.stride(2) != 1 or layer_cache.stride(4) != 1:
        raise ValueError(f"a head must be contiguous, not of strides {query.stride()} and {layer_cache.stride()}")
    if query.dtype not in DTYPES:
        raise ValueError(f"attention in {query.dtype}; there are {named(DTYPES)}")
    if (layer_cache.dtype is torch.float8_e4m3fn) != (cache_scales is not None):
        raise ValueError(f"scales belong to a cache of float8_e4m3fn and to no other; this one is {layer_cache.dtype}")
    if cache_scales is None:
        if layer_cache.dtype != query.dtype:
            raise ValueError(f"queries of {query.dtype} over a cache of {layer_cache.dtype}")
    elif cache_scales.shape != (2, num_kv_heads) or cache_scales.dtype is not torch.float32:
        raise ValueError(
            f"scales are [2, {num_kv_heads}] float32, not {tuple(cache_scales.shape)} {cache_scales.dtype}"
        )
    if block_table.ndim != 2 or len(block_table) != len(seq_lens) or block_table.stride(1) != 1:
        raise ValueError(f"block table {tuple(block_table.shape)} for {len(seq_lens)} sequences")
    if soft_cap < 0 or window < 0:
        raise ValueError(f"soft cap {soft_cap} and window {window} are at least 0, which stands for none")
