"""New keys and values into their slots of the paged cache.

A slot is `block * block_size + row`. Tokens whose slot is negative are padding (a decode step runs in a batch of fixed
size) and are not written. An fp8 cache (e4m3) holds `x / scale`, rounded to nearest even and saturated: e4m3 has no
infinity. Its bits are made from float32's here, since only some targets convert: adding and subtracting a number whose
last place is the wanted one rounds in float32's own way, and an e4m3 number 256 times too small is the upper half of a
float16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cache_twins import kv_write_torch

__all__ = ["kv_write", "kv_write_torch"]


@triton.jit
def e4m3_bits(x):
    """float32 -> the bits of the nearest e4m3, as uint8."""
    size = tl.minimum(tl.abs(x), 448.0)
    # One and a half times 2^20 times size's own power of two: its last place is e4m3's, three bits below size's first.
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
    magic = ((exponent + (20 << 23)) | 0x400000).to(tl.float32, bitcast=True)
    half = (((size + magic) - magic) / 256).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return ((half >> 7) | sign).to(tl.uint8)


@triton.jit
def kv_write_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slots_ptr,
    scales_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_value,
    stride_row,
    stride_head,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Grid (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        head = tl.arange(0, HEADS)
        dim = tl.arange(0, DIM_PAD)
        inside = (head < num_kv_heads)[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(
            key_ptr + token * stride_key_token + head[:, None] * stride_key_head + dim[None, :], mask=inside, other=0.0
        )
        value = tl.load(
            value_ptr + token * stride_value_token + head[:, None] * stride_value_head + dim[None, :],
            mask=inside,
            other=0.0,
        )
        if FP8:
            key_scale = tl.load(scales_ptr + head, mask=head < num_kv_heads, other=1.0)
            value_scale = tl.load(scales_ptr + num_kv_heads + head, mask=head < num_kv_heads, other=1.0)
            key = e4m3_bits(tl.div_rn(key.to(tl.float32), key_scale[:, None] + tl.zeros_like(key).to(tl.float32)))
            value = e4m3_bits(
                tl.div_rn(value.to(tl.float32), value_scale[:, None] + tl.zeros_like(value).to(tl.float32))
            )
        row = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_row
        place = cache_ptr + row + head[:, None] * stride_head + dim[None, :]
        tl.store(place, key, mask=inside)
        tl.store(place + stride_value, value, mask=inside)


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    layer_cache: torch.Tensor,
    slots: torch.Tensor,
    cache_scales: torch.Tensor | None = None,
) -> None:
    """Write `key` and `value`, `[num_tokens, num_kv_heads, head_dim]` each, into `layer_cache` `[num_blocks, 2,
    block_size, num_kv_heads, head_dim]` at `slots` `[num_tokens]` int64.

    Any strides but for the last, which is 1. `cache_scales` `[2, num_kv_heads]` float32 belong to a cache of
    float8_e4m3fn and to no other: value = stored * scale. No two slots are equal, and none lies beyond the cache (not
    checked: that would wait for the device).
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    fp8 = layer_cache.dtype is torch.float8_e4m3fn
    if (
        value.shape != key.shape
        or layer_cache.shape[1] != 2
        or layer_cache.shape[3:] != (num_kv_heads, head_dim)
        or slots.shape != (num_tokens,)
        or not key.stride(2) == value.stride(2) == layer_cache.stride(4) == 1
        or (cache_scales is not None) != fp8
        or (cache_scales is not None and cache_scales.shape != (2, num_kv_heads))
        or not (fp8 or key.dtype == value.dtype == layer_cache.dtype)
    ):
        raise ValueError(
            f"kv_write: key {tuple(key.shape)} {key.dtype} {key.stride()}, value {tuple(value.shape)} {value.dtype} "
            f"{value.stride()}, cache {tuple(layer_cache.shape)} {layer_cache.dtype} {layer_cache.stride()}, slots "
            f"{tuple(slots.shape)}, scales {None if cache_scales is None else tuple(cache_scales.shape)}"
        )
    if not num_tokens:
        return
    dim_pad = triton.next_power_of_2(head_dim)
    heads = triton.next_power_of_2(num_kv_heads)
    kv_write_kernel[(num_tokens,)](
        key,
        value,
        layer_cache.view(torch.uint8) if fp8 else layer_cache,
        slots,
        slots if cache_scales is None else cache_scales,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *layer_cache.stride()[:4],
        num_kv_heads,
        BLOCK_SIZE=layer_cache.shape[2],
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        HEADS=heads,
        FP8=fp8,
        num_warps=min(8, max(1, dim_pad * heads // 256)),
    )
