"""Paged attention against a naive twin: ragged batches, blocks in any order, and NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention import build_attention_batch, paged_attention
from tests.kernels.naive_attention import naive_paged_attention

CPU = torch.device("cpu")


@dataclass
class Case:
    """A batch: per sequence, how many tokens lie in the cache already and how many are new."""

    sequences: list[tuple[int, int]]  # (cached, new)
    block_size: int = 4
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    seed: int = 0
    dtype: torch.dtype = torch.float32


def errors(case: Case) -> torch.Tensor:
    """Run both; the difference, relative to what float64 gives where that is above 1. The caches must agree too."""
    torch.manual_seed(case.seed)
    # As the runner orders them: one new token and something before it first.
    sequences = sorted(case.sequences, key=lambda s: s[1] > 1 or s[0] == 0)
    query_lens = [new for _, new in sequences]
    seq_lens = [cached + new for cached, new in sequences]
    counts = [-(-seq_len // case.block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks).tolist()
    table = []
    for count in counts:
        table.append([order.pop() for _ in range(count)])

    # A layer is a strided view of the block-major cache.
    shape = (num_blocks, 3, 2, case.block_size, case.num_kv_heads, case.head_dim)
    cache = torch.full(shape, torch.nan, dtype=case.dtype)[:, 1]
    for (cached, _), blocks in zip(sequences, table, strict=True):
        for j in range(cached):
            row = torch.randn(2, case.num_kv_heads, case.head_dim).to(case.dtype)
            cache[blocks[j // case.block_size], :, j % case.block_size] = row
    num_tokens = sum(query_lens)
    query = torch.randn(num_tokens, case.num_kv_heads * case.group, case.head_dim).to(case.dtype)
    key = torch.randn(num_tokens, case.num_kv_heads, case.head_dim).to(case.dtype)
    value = torch.randn(num_tokens, case.num_kv_heads, case.head_dim).to(case.dtype)
    twin_cache = cache.clone()
    scale = case.head_dim**-0.5
    expected = naive_paged_attention(query, key, value, twin_cache, query_lens, seq_lens, table, scale)

    width = max(counts)
    stale = -1  # beyond a sequence's end the table may hold anything
    batch = build_attention_batch(
        np.array(query_lens),
        np.array(seq_lens),
        np.array([blocks + [stale] * (width - len(blocks)) for blocks in table]),
        block_size=case.block_size,
        dtype=case.dtype,
        device=CPU,
    )
    made = paged_attention(query, key, value, cache, batch, scale)
    assert made.shape == query.shape
    assert made.dtype == case.dtype
    assert torch.equal(cache.nan_to_num(7.0), twin_cache.nan_to_num(7.0)), "the cache was written elsewhere"
    return (made.double() - expected).abs() / expected.abs().clamp(min=1.0)


@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param([(0, 1)], id="one token"),
        pytest.param([(0, 63)], id="empty cache"),
        pytest.param([(60, 1)], id="decode"),
        pytest.param([(2, 1)], id="decode within one block"),
        pytest.param([(3, 1), (0, 1)], id="decode beside a prompt of one token"),
        pytest.param([(7, 60)], id="chunk behind others"),
        pytest.param([(8, 8)], id="chunk on a border"),
        pytest.param([(1, 1), (2, 1), (11, 1), (60, 1), (63, 1), (64, 1)], id="decodes of all lengths"),
        pytest.param([(5, 1), (0, 9), (30, 1), (4, 13), (0, 1), (63, 2)], id="all at once"),
    ],
)
def test_layouts(sequences: list[tuple[int, int]]) -> None:
    assert errors(Case(sequences)).max() < 2e-6


@pytest.mark.parametrize("head_dim", [16, 32, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_head_layouts(group: int, head_dim: int) -> None:
    case = Case([(9, 1), (2, 1), (3, 5), (0, 6)], group=group, head_dim=head_dim, num_kv_heads=1 + group % 2)
    assert errors(case).max() < 2e-6


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_is_off_by_little_more_than_one_rounding(seed: int) -> None:
    case = Case(
        [(60, 1), (7, 1), (0, 30), (20, 13)], seed=seed, dtype=torch.bfloat16, head_dim=64, group=4, block_size=16
    )
    difference = errors(case)
    # A bfloat16 has 8 bits; weights and result are rounded once each.
    assert difference.max() < 2.0**-7
    assert difference.mean() < 2.0**-10


@settings(max_examples=40, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 20), st.one_of(st.just(1), st.integers(1, 9))), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 2, 5, 16]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_any_batch(sequences: list[tuple[int, int]], block_size: int, num_kv_heads: int, group: int, seed: int) -> None:
    assert errors(Case(sequences, block_size, num_kv_heads, group, 8, seed)).max() < 2e-6


def test_decodes_of_like_length_share_a_call() -> None:
    """What continuous batching gains: one call for many, and no long sequence that pads all others."""
    lens = np.array([17, 18, 20, 400])
    table = np.arange(4 * 25).reshape(4, 25)
    batch = build_attention_batch(
        np.ones(4, dtype=np.int64), lens, table, block_size=16, dtype=torch.float32, device=CPU
    )
    assert [group.num_seqs for group in batch.decodes] == [3, 1]
    assert batch.chunks == []
