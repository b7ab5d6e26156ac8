"""Cache traffic: new keys and values to their slots, whole blocks out of the cache and back, image embeddings."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.kernels.measuring import Case, Sizes
from kernels.block_copy import gather_blocks, scatter_blocks
from kernels.cache_twins import gather_blocks_torch, kv_write_torch, scatter_blocks_torch, scatter_embeddings_torch
from kernels.embedding_scatter import scatter_embeddings
from kernels.kv_write import kv_write

_BF16 = torch.bfloat16


def cases(sizes: Sizes) -> Iterator[Case]:
    yield from _writes(sizes)
    yield from _blocks(sizes)
    yield from _embeddings(sizes)


def _writes(sizes: Sizes) -> Iterator[Case]:
    for num_tokens in (3,) if sizes.quick else (32, 8192):
        num_blocks = -(-num_tokens // 16) + 1
        cache = torch.empty(num_blocks, 2, 2, 16, 8, 128, dtype=_BF16, device=sizes.device)[:, 1]
        key, value = torch.randn(2, num_tokens, 8, 128, device=sizes.device).to(_BF16)
        slots = torch.randperm(num_blocks * 16, device=sizes.device)[:num_tokens]
        yield Case(
            kernel="kv_write",
            shape=f"{num_tokens} tokens, 8 heads of 128",
            ours=functools.partial(kv_write, key, value, cache, slots),
            num_bytes=4 * key.nbytes,
            others={"eager": functools.partial(kv_write_torch, key, value, cache, slots)},
        )


def _blocks(sizes: Sizes) -> Iterator[Case]:
    # A block of 16 tokens of a 7B model: 28 layers, 4 KV heads of 128, bf16: 896 KiB.
    num_blocks, num_moved, row = (4, 2, 128) if sizes.quick else (4096, 1024, 28 * 2 * 16 * 4 * 128)
    cache = torch.empty(num_blocks, row, dtype=_BF16, device=sizes.device).normal_()
    staging = torch.empty(num_moved, row, dtype=_BF16, device=sizes.device)
    ids = torch.randperm(num_blocks, device=sizes.device)[:num_moved]
    sums = torch.empty(num_moved, 2, dtype=torch.int32, device=sizes.device)
    for checksums in (None, sums):
        shape = f"{num_moved} blocks of {row * 2 >> 10} KiB{'' if checksums is None else ', checksums'}"
        yield Case(
            kernel="gather_blocks",
            shape=shape,
            ours=functools.partial(gather_blocks, cache, ids, staging, checksums),
            num_bytes=2 * staging.nbytes,
            others={"eager": functools.partial(gather_blocks_torch, cache, ids, staging)},
            goal=0.85,
        )
        yield Case(
            kernel="scatter_blocks",
            shape=shape,
            ours=functools.partial(scatter_blocks, staging, ids, cache, checksums),
            num_bytes=2 * staging.nbytes,
            others={"eager": functools.partial(scatter_blocks_torch, staging, ids, cache)},
            goal=0.85,
        )


def _embeddings(sizes: Sizes) -> Iterator[Case]:
    num_tokens, num_rows, width = (8, 4, 32) if sizes.quick else (8192, 4096, 3584)
    hidden = torch.randn(num_tokens, width, device=sizes.device).to(_BF16)
    buffer = torch.randn(num_rows, 2 * width, device=sizes.device).to(_BF16)
    tokens = torch.randperm(num_tokens, device=sizes.device)[:num_rows]
    rows = torch.randperm(num_rows, device=sizes.device)
    for level in (0, 1):
        yield Case(
            kernel="embeddings",
            shape=f"{num_rows} of {width}, level {level}",
            ours=functools.partial(scatter_embeddings, hidden, buffer, tokens, rows, level),
            num_bytes=num_rows * width * 2 * (3 if level else 2),
            others={"eager": functools.partial(scatter_embeddings_torch, hidden, buffer, tokens, rows, level)},
        )
