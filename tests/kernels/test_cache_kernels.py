"""What moves cache rows and embeddings gives exactly what the twins give; NaN stands wherever nothing was written."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_copy import gather_blocks, gather_blocks_torch, scatter_blocks, scatter_blocks_torch
from kernels.embedding_scatter import scatter_embeddings, scatter_embeddings_torch
from kernels.kv_write import kv_write, kv_write_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
@settings(max_examples=10, deadline=None)
@given(
    num_tokens=st.integers(0, 9), num_kv_heads=st.integers(1, 3), head_dim=st.sampled_from([8, 33, 80, 128]),
    block_size=st.sampled_from([1, 5, 16]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_kv_write(
    dtype: torch.dtype, num_tokens: int, num_kv_heads: int, head_dim: int, block_size: int, seed: int
) -> None:
    """Into one layer of a block-major cache, at slots in any order, some of them padding; out of a projection."""
    torch.manual_seed(seed)
    fp8 = dtype.itemsize == 1
    num_blocks = -(-num_tokens // block_size) + 2
    cache = torch.zeros(num_blocks, 3, 2, block_size, num_kv_heads, head_dim) + torch.nan
    cache = cache.to(dtype)
    twin = cache.clone()
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[torch.rand(num_tokens) < 0.2] = -1
    # Many sizes: subnormal e4m3, beyond its largest, and zero.
    projection = (
        torch.randn(num_tokens, 1 + 2 * num_kv_heads, head_dim) * torch.randint(-14, 12, (num_tokens, 1, 1)).exp2()
    )
    projection[:, :, 0] = 0
    projection = projection.to(torch.bfloat16 if fp8 else dtype)
    key, value = projection[:, 1 : num_kv_heads + 1], projection[:, num_kv_heads + 1 :]
    scales = torch.rand(2, num_kv_heads) + 0.1 if fp8 else None
    kv_write(key, value, cache[:, 1], slots, scales)
    kv_write_torch(key, value, twin[:, 1], slots, scales)
    assert torch.equal(bits(cache), bits(twin))


def test_e4m3_is_that_of_pytorch() -> None:
    """All bfloat16 numbers up to its largest: each rounds as PyTorch rounds, ties to even."""
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.float() <= 448]
    every = torch.nn.functional.pad(every, (0, -len(every) % 2048))
    key = torch.stack((every, -every)).view(-1, 8, 256)
    cache = torch.empty(len(key), 2, 1, 8, 256, dtype=torch.float8_e4m3fn)
    kv_write(key, key, cache, torch.arange(len(key)), torch.ones(2, 8))
    expected = key.float().to(torch.float8_e4m3fn)
    assert torch.equal(bits(cache[:, 0, 0]), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(num=st.integers(0, 5), width=st.sampled_from([2, 64, 4096 * 2 + 34]), seed=st.integers(0, 2**31))
def test_blocks_there_and_back(dtype: torch.dtype, num: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    cache = torch.randn(8, width).to(dtype)
    cache[0] = torch.nan  # moved as bits
    ids = torch.randperm(8)[:num]
    # Rows of a cache or a buffer need not stand end to end, and what stood in the checksums does not count.
    cache, staging = torch.cat((cache, cache), dim=1)[:, :width], torch.full((6, width + 8), torch.nan, dtype=dtype)
    staging, checksums = staging[:, :width], torch.full((num, 2), 7, dtype=torch.int32)
    twin_staging, twin_checksums = staging.clone(), torch.empty_like(checksums)
    gather_blocks(cache, ids, staging, checksums)
    gather_blocks_torch(cache, ids, twin_staging, twin_checksums)
    assert torch.equal(bits(staging), bits(twin_staging))
    assert torch.equal(checksums, twin_checksums)
    back = torch.full_like(cache, torch.nan)
    twin_back, again = back.clone(), torch.full_like(checksums, 7)
    scatter_blocks(staging, ids, back, again)
    scatter_blocks_torch(staging, ids, twin_back)
    assert torch.equal(bits(back), bits(twin_back))
    assert torch.equal(again, checksums)


def test_a_checksum_notices_what_changes_and_what_moves() -> None:
    row = torch.randint(-(2**31), 2**31, (1, 5000), dtype=torch.int64).int()
    changed, exchanged = row.clone(), row.clone()
    changed[0, 4321] += 1
    exchanged[0, [7, 4900]] = row[0, [4900, 7]]
    sums = torch.empty(3, 2, dtype=torch.int32)
    cache = torch.cat((row, changed, exchanged))
    gather_blocks(cache, torch.arange(3), torch.empty_like(cache), sums)
    assert len({tuple(each) for each in sums.tolist()}) == 3


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@settings(max_examples=6, deadline=None)
@given(num_tokens=st.integers(1, 9), width=st.sampled_from([3, 64, 1100]), seed=st.integers(0, 2**31))
def test_embeddings_into_the_token_stream(
    dtype: torch.dtype, level: int, num_tokens: int, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(num_tokens, width + 3).to(dtype)[:, :width]
    buffer = torch.randn(12, 3 * width + 5).to(dtype)[:, : 3 * width]
    tokens = torch.randperm(num_tokens)[: torch.randint(0, num_tokens + 1, ())]
    rows = torch.randint(0, 12, (len(tokens),))
    twin = hidden.clone()
    scatter_embeddings(hidden, buffer, tokens, rows, level)
    scatter_embeddings_torch(twin, buffer, tokens, rows, level)
    assert torch.equal(hidden, twin)


_CACHE = torch.zeros(4, 2, 4, 2, 8)
_TOKENS = torch.zeros(3, dtype=torch.int64)
_SUMS = torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: kv_write(torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), _CACHE, _TOKENS), "(3, 1, 8)"),
        (lambda: kv_write(torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), _CACHE, _TOKENS[:2]), "(2,)"),
        (lambda: kv_write(torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), _CACHE.half(), _TOKENS), "float16"),
        (
            lambda: kv_write(torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), _CACHE, _TOKENS, torch.ones(2, 2)),
            "scales (2, 2)",
        ),
        (lambda: gather_blocks(torch.zeros(4, 8), _TOKENS, torch.zeros(2, 8)), "3 of 32 bytes"),
        (lambda: gather_blocks(torch.zeros(4, 3).half(), _TOKENS, torch.zeros(3, 3).half()), "6 bytes"),
        (lambda: scatter_blocks(torch.zeros(3, 8), _TOKENS, torch.zeros(3, 9)), "(3, 9)"),
        (lambda: scatter_blocks(torch.zeros(3, 8), _TOKENS, torch.zeros(3, 8).int()), "torch.int32"),
        (lambda: gather_blocks(torch.zeros(3, 16)[:, ::2], _TOKENS, torch.zeros(3, 8)), "contiguous"),
        (lambda: gather_blocks(torch.zeros(3, 8), _TOKENS, torch.zeros(3, 8), _SUMS[:2]), "checksums (2, 2)"),
        (
            lambda: gather_blocks(torch.zeros(3, 8), _TOKENS, torch.zeros(3, 8), _SUMS.T.contiguous().T),
            "checksums (3, 2)",
        ),
        (lambda: scatter_embeddings(torch.zeros(3, 8), torch.zeros(3, 16), _TOKENS, _TOKENS, 2), "level 2"),
        (lambda: scatter_embeddings(torch.zeros(3, 8), torch.zeros(3, 16), _TOKENS, _TOKENS, -1), "level -1"),
        (lambda: scatter_embeddings(torch.zeros(3, 8), torch.zeros(3, 16).half(), _TOKENS, _TOKENS, 0), "float16"),
        (lambda: scatter_embeddings(torch.zeros(8, 3).T, torch.zeros(3, 16), _TOKENS, _TOKENS, 0), "(3, 8)"),
        (lambda: scatter_embeddings(torch.zeros(3, 8), torch.zeros(3, 16), _TOKENS, _TOKENS[:1], 0), "(1,)"),
    ],
)
def test_a_shape_that_is_not_supported_is_named(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        call()
