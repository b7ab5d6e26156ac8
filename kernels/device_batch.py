"""One step's flattened batch as the Triton kernels take it: small int32 tensors, made once a step for all layers.

The counterpart, for a CPU, is `AttentionBatch` in `kernels/paged_attention.py`. Requests with one new token and
something before it stand first, in both. No Triton is imported until something is attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.token_places import token_places


@dataclass(slots=True)
class DeviceBatch:
    """What every layer of a step is told. Tensors are on the device."""

    num_decodes: int  # sequences with one new token, which come first
    max_seq_len: int  # no decode is longer
    query_starts: torch.Tensor  # [num_seqs + 1] int32, places of the sequences' tokens in the flattened batch
    seq_lens: torch.Tensor  # [num_seqs] int32, tokens in the cache after this step
    block_table: torch.Tensor  # [num_seqs, max_blocks] int32
    slots: torch.Tensor  # [num_tokens] int64, block * block_size + row, where each new token's key and value go


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device: on a CPU the same memory, on a GPU a copy that is queued, not awaited."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def build_device_batch(
    query_lens: NDArray[np.int64],  # [num_seqs], those with one token and something before it first
    seq_lens: NDArray[np.int64],  # [num_seqs]
    block_table: NDArray[np.int64],  # [num_seqs, max_blocks]
    *,
    block_size: int,
    device: torch.device,
) -> DeviceBatch:
    """From the runner's arrays on the host. One copy a tensor, from pinned memory where there is a GPU."""
    places = token_places(query_lens, seq_lens, block_table, block_size)

    return DeviceBatch(
        num_decodes=places.num_decodes,
        max_seq_len=int(seq_lens[: places.num_decodes].max(initial=1)),
        query_starts=to_device(places.starts.astype(np.int32), device),
        seq_lens=to_device(seq_lens.astype(np.int32), device),
        block_table=to_device(block_table.astype(np.int32), device),
        slots=to_device(places.blocks * block_size + places.rows, device),
    )


def attend(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    layer_cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_dim], the new tokens' rows written
    batch: DeviceBatch,
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    span_ends: torch.Tensor | None = None,  # [num_tokens] int32, see paged_prefill
    cache_scales: torch.Tensor | None = None,  # [2, num_kv_heads] float32 of an e4m3 cache
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Decodes and prefill chunks of one batch, by the kernel of each. Errors are the kernels'."""
    from kernels.paged_decode import paged_decode
    from kernels.paged_prefill import paged_prefill

    n = batch.num_decodes
    out = torch.empty_like(query)
    if n:
        paged_decode(
            query[:n], layer_cache, batch.block_table[:n], batch.seq_lens[:n], scale, soft_cap=soft_cap, window=window,
            cache_scales=cache_scales, max_seq_len=batch.max_seq_len, out=out[:n],
        )  # fmt: skip
    if n < len(batch.seq_lens):
        paged_prefill(
            query, layer_cache, batch.block_table[n:], batch.query_starts[n:], batch.seq_lens[n:], scale,
            soft_cap=soft_cap, window=window, span_ends=span_ends, cache_scales=cache_scales, out=out,
        )  # fmt: skip
    return out
