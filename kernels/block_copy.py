"""Whole blocks, all layers of each, between the cache and one contiguous staging buffer: the device's part of a KV
transfer.

A block is a row of 32-bit words. On the way a checksum of each row can be taken, which costs nothing that shows: the
words are in registers already. It is two sums modulo 2^32, of the words w_i and of (i + 1) w_i, so that neither a
changed word nor two exchanged ones go unnoticed, and it adds up in any order, as in Fletcher's (1982).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cache_twins import gather_blocks_torch, scatter_blocks_torch

__all__ = ["gather_blocks", "gather_blocks_torch", "scatter_blocks", "scatter_blocks_torch"]

#: Words that one program moves: 32 a thread, eight loads of 16 bytes under way.
_WORDS = 4096


@triton.jit
def block_copy_kernel(
    source,
    target,
    source_rows,
    target_rows,
    checksums,
    source_stride,
    target_stride,
    num_words,
    WORDS: tl.constexpr,
    PICK_SOURCE: tl.constexpr,
    CHECKSUM: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if PICK_SOURCE:
        source_row, target_row = tl.load(source_rows + i), i
    else:
        source_row, target_row = i, tl.load(target_rows + i)
    columns = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = columns < num_words
    words = tl.load(source + source_row * source_stride + columns, mask=inside, other=0)
    tl.store(target + target_row * target_stride + columns, words, mask=inside)
    if CHECKSUM:
        tl.atomic_add(checksums + 2 * i, tl.sum(words, axis=0))
        tl.atomic_add(checksums + 2 * i + 1, tl.sum(words * (columns + 1), axis=0))


def gather_blocks(
    cache: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, checksums: torch.Tensor | None = None
) -> None:
    """`staging[i] = cache[block_ids[i]]`.

    `cache` `[num_blocks, row]` and `staging` `[>= n, row]`, one dtype, rows contiguous and of whole 32-bit words;
    `block_ids` `[n]` int64, each within the cache (not checked: that would wait for the device). `checksums` `[n, 2]`
    int32, if given, gets the sums of each row.
    """
    _launch(cache, staging, block_ids, checksums, pick_source=True)


def scatter_blocks(
    staging: torch.Tensor, block_ids: torch.Tensor, cache: torch.Tensor, checksums: torch.Tensor | None = None
) -> None:
    """`cache[block_ids[i]] = staging[i]`; no id twice. The rest as in `gather_blocks`."""
    _launch(staging, cache, block_ids, checksums, pick_source=False)


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    block_ids: torch.Tensor,
    checksums: torch.Tensor | None,
    *,
    pick_source: bool,
) -> None:
    num_rows = len(block_ids)
    staging = target if pick_source else source
    row_bytes = source.shape[1] * source.element_size()
    if (
        source.shape[1] != target.shape[1]
        or source.dtype != target.dtype
        or len(staging) < num_rows
        or row_bytes % 4
        or not source.stride(1) == target.stride(1) == 1
        or (checksums is not None and (checksums.shape != (num_rows, 2) or not checksums.is_contiguous()))
    ):
        raise ValueError(
            f"blocks: {num_rows} of {row_bytes} bytes from {tuple(source.shape)} {source.dtype} to "
            f"{tuple(target.shape)} {target.dtype}, checksums {None if checksums is None else tuple(checksums.shape)}; "
            "rows must be equal, contiguous and of whole 32-bit words"
        )
    if checksums is not None:
        checksums.zero_()
    if not num_rows or not row_bytes:
        return
    source, target = source.view(torch.int32), target.view(torch.int32)
    grid = (num_rows, triton.cdiv(source.shape[1], _WORDS))
    block_copy_kernel[grid](
        source,
        target,
        block_ids,
        block_ids,
        block_ids if checksums is None else checksums,
        source.stride(0),
        target.stride(0),
        source.shape[1],
        WORDS=_WORDS,
        PICK_SOURCE=pick_source,
        CHECKSUM=checksums is not None,
        num_warps=4,
    )
