"""The Triton attention kernels against their twins in float64, under the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.device_batch import attend, build_device_batch
from kernels.paged_decode import choose_num_splits, paged_decode, paged_decode_torch
from kernels.paged_prefill import paged_prefill, paged_prefill_torch
from tests.kernels.attention_case import BOUNDS, AttentionCase, error, make_inputs
from tests.kernels.naive_attention import naive_paged_attention


def decode_error(
    case: AttentionCase, *, soft_cap: float = 0.0, window: int = 0, max_seq_len: int | None = None
) -> float:
    one_new = [(cached + new - 1, 1) for cached, new in case.sequences]
    case = AttentionCase(**{**vars(case), "sequences": tuple(one_new)})
    inputs = make_inputs(case, window=window)
    exact = inputs.in_float64()
    made = paged_decode(
        inputs.query, inputs.layer_cache, inputs.block_table, inputs.seq_lens, case.scale,
        soft_cap=soft_cap, window=window, cache_scales=inputs.cache_scales, max_seq_len=max_seq_len,
    )  # fmt: skip
    expected = paged_decode_torch(
        exact.query, exact.layer_cache, exact.block_table, exact.seq_lens, case.scale,
        soft_cap=soft_cap, window=window, cache_scales=exact.cache_scales,
    )  # fmt: skip
    assert made.dtype == case.dtype
    return error(made, expected)


def prefill_error(
    case: AttentionCase, *, soft_cap: float = 0.0, window: int = 0, span_ends: torch.Tensor | None = None
) -> float:
    inputs = make_inputs(case, window=window)
    exact = inputs.in_float64()
    made = paged_prefill(
        inputs.query, inputs.layer_cache, inputs.block_table, inputs.query_starts, inputs.seq_lens, case.scale,
        soft_cap=soft_cap, window=window, span_ends=span_ends, cache_scales=inputs.cache_scales,
    )  # fmt: skip
    expected = paged_prefill_torch(
        exact.query, exact.layer_cache, exact.block_table, exact.query_starts, exact.seq_lens, case.scale,
        soft_cap=soft_cap, window=window, span_ends=span_ends, cache_scales=exact.cache_scales,
    )  # fmt: skip
    assert made.dtype == case.dtype
    return error(made, expected)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = (1, 63, 65, 1023)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_agrees_at_unfriendly_lengths(dtype: torch.dtype) -> None:
    """Lengths around tile and block; the longest is of several splits, and of one under the shortest's splits."""
    case = AttentionCase(tuple((length - 1, 1) for length in LENGTHS), block_size=16, group=7, head_dim=64, dtype=dtype)
    assert decode_error(case) < BOUNDS[dtype]
    assert decode_error(case, max_seq_len=1) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_agrees_at_unfriendly_lengths(dtype: torch.dtype) -> None:
    sequences = ((0, 1), (0, 65), (1022, 1), (63, 63), (0, 0), (7, 130))
    case = AttentionCase(sequences, block_size=16, num_kv_heads=1, group=3, head_dim=64, dtype=dtype)
    assert prefill_error(case) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ramp", [(-300.0, -300.0), (300.0, 300.0), (-400.0, 300.0), (300.0, -400.0)])
def test_scores_beyond_what_exp2_holds(ramp: tuple[float, float], dtype: torch.dtype) -> None:
    """All far above or below zero, and rising or falling along the sequence by more than float32's exponents span: each
    tile, and each split, has another maximum. Splits of one tile and of several, empty ones, and no splits."""
    case = AttentionCase(((0, 1), (59, 6), (300, 20)), block_size=16, num_kv_heads=1, dtype=dtype, ramp=ramp)
    assert prefill_error(case) < case.bound
    for max_seq_len in (1, 64 * 4, 64 * 9):
        assert decode_error(case, max_seq_len=max_seq_len) < case.bound
    with np.errstate(over="ignore"):  # the cap's own exponential may be infinite, and no other
        assert prefill_error(case, soft_cap=2.5) < case.bound
        assert decode_error(case, soft_cap=2.5, max_seq_len=64 * 5) < case.bound


@pytest.mark.parametrize("head_dim", [1, 32, 72, 80, 96, 128, 256])
def test_heads_that_are_no_power_of_two_are_padded(head_dim: int) -> None:
    case = AttentionCase(((20, 9), (0, 3)), head_dim=head_dim, num_kv_heads=1)
    assert decode_error(case) < BOUNDS[case.dtype]
    assert prefill_error(case) < BOUNDS[case.dtype]


def test_no_sequence_and_64_of_them() -> None:
    for num_seqs in (0, 64):
        case = AttentionCase(tuple((3 * i % 11, 1 + i % 3) for i in range(num_seqs)), num_kv_heads=1)
        assert decode_error(case) < BOUNDS[case.dtype]
        assert prefill_error(case) < BOUNDS[case.dtype]


def test_the_padding_of_a_captured_batch_gets_zeros() -> None:
    inputs = make_inputs(AttentionCase(((130, 1), (0, 1))))
    seq_lens = torch.tensor([131, 0], dtype=torch.int32)
    for max_seq_len in (1, 1000):
        made = paged_decode(
            inputs.query, inputs.layer_cache, inputs.block_table, seq_lens, 0.25, max_seq_len=max_seq_len
        )
        assert not made.isnan().any()
        assert not made[1].any()


def test_results_go_where_they_are_wanted_and_nowhere_else() -> None:
    """`out` and `query` may be parts of something wider, as the projection of Q, K and V is."""
    case = AttentionCase(((5, 4), (0, 2)), head_dim=24)
    inputs = make_inputs(case)
    wide = torch.full((8, 6, 40), 7.0)
    wide_query = torch.full((6, 6, 30), torch.nan)
    wide_query[:, 1:5, :24] = inputs.query
    out = wide[1:7, 1:5, 8:32]
    arguments = (inputs.layer_cache, inputs.block_table, inputs.query_starts, inputs.seq_lens, case.scale)
    assert paged_prefill(wide_query[:, 1:5, :24], *arguments, out=out) is out
    assert torch.equal(out, paged_prefill(inputs.query, *arguments))
    wide[1:7, 1:5, 8:32] = 7.0
    assert bool((wide == 7.0).all())


def test_tokens_of_no_sequence_are_left_alone() -> None:
    """Decodes, which another kernel attends to, stand before the chunks of a batch."""
    case = AttentionCase(((5, 4), (0, 90)))
    inputs = make_inputs(case)
    arguments = (inputs.layer_cache, inputs.block_table)
    query = torch.cat((torch.full((70, 4, 16), torch.nan), inputs.query, torch.full((70, 4, 16), torch.nan)))
    out = torch.full_like(query, 7.0)
    paged_prefill(query, *arguments, inputs.query_starts + 70, inputs.seq_lens, case.scale, out=out)
    alone = paged_prefill(inputs.query, *arguments, inputs.query_starts, inputs.seq_lens, case.scale)
    assert error(out[70:164], alone.double()) < BOUNDS[case.dtype]
    assert bool((out[:70] == 7.0).all())
    assert bool((out[164:] == 7.0).all())


@pytest.mark.parametrize("soft_cap", [0.0, 2.5])
@pytest.mark.parametrize("window", [0, 1, 5, 70])
def test_soft_cap_and_window(soft_cap: float, window: int) -> None:
    case = AttentionCase(((90, 1), (0, 70), (3, 66), (0, 1)), num_kv_heads=1)
    assert prefill_error(case, soft_cap=soft_cap, window=window) < BOUNDS[case.dtype]
    assert decode_error(case, soft_cap=soft_cap, window=window) < BOUNDS[case.dtype]
    assert decode_error(case, soft_cap=soft_cap, window=window, max_seq_len=1) < BOUNDS[case.dtype]


@pytest.mark.parametrize("window", [0, 6])
def test_tokens_of_an_image_see_all_of_it(window: int) -> None:
    """Images within a chunk, at its end, one that goes on in the next chunk, and one of several tiles of queries and of
    keys."""
    case = AttentionCase(((10, 20), (0, 9), (0, 150)), group=1, num_kv_heads=1)
    span_ends = torch.zeros(179, dtype=torch.int32)
    span_ends[2:7] = 17  # positions 12 to 16 of the first sequence
    span_ends[15:20] = 30
    span_ends[20:29] = 40
    span_ends[29 + 20 : 29 + 140] = 140
    assert prefill_error(case, span_ends=span_ends, window=window) < BOUNDS[case.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_cache_with_a_scale_per_head(dtype: torch.dtype) -> None:
    for ramp in ((0.0, 0.0), (-300.0, 250.0)):
        case = AttentionCase(((70, 3), (0, 5)), head_dim=32, dtype=dtype, fp8=True, ramp=ramp)
        assert decode_error(case) < case.bound
        with np.errstate(over="ignore"):  # the cap's own exponential
            assert prefill_error(case, soft_cap=3.0) < case.bound


def test_every_value_of_e4m3_is_read_exactly() -> None:
    """One key with weight 1, whose value has all finite codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    cache = torch.zeros(1, 2, 1, 1, 254, dtype=torch.uint8)
    cache[0, 1, 0, 0] = finite
    cache = cache.view(torch.float8_e4m3fn)
    one = torch.ones(1, dtype=torch.int32)
    made = paged_decode(
        torch.ones(1, 1, 254), cache, torch.zeros(1, 1, dtype=torch.int32), one, 1.0, cache_scales=torch.ones(2, 1)
    )
    assert torch.equal(made.flatten(), finite.view(torch.float8_e4m3fn).float())


@settings(max_examples=12, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 40)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 16]),
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    head_dim=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    fp8=st.booleans(),
    soft_cap=st.sampled_from([0.0, 1.5]),
    window=st.sampled_from([0, 9, 33]),
    seed=st.integers(0, 2**31),
)
def test_any_batch(
    sequences: list[tuple[int, int]],
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    fp8: bool,
    soft_cap: float,
    window: int,
    seed: int,
) -> None:
    case = AttentionCase(tuple(sequences), block_size, num_kv_heads, group, head_dim, dtype, fp8, seed)
    assert decode_error(case, soft_cap=soft_cap, window=window) < BOUNDS[dtype]
    assert prefill_error(case, soft_cap=soft_cap, window=window) < BOUNDS[dtype]


def test_the_twin_is_what_the_naive_loops_say() -> None:
    """Both definitions, written apart, of the plain case."""
    case = AttentionCase(((5, 3), (0, 4), (8, 1)), dtype=torch.float64)
    inputs = make_inputs(case)
    cache, table, starts, seq_lens = inputs.layer_cache, inputs.block_table, inputs.query_starts, inputs.seq_lens
    new = [
        cache[int(table[i, p // case.block_size]), :, p % case.block_size]
        for i, (cached, count) in enumerate(case.sequences)
        for p in range(cached, cached + count)
    ]
    key, value = torch.stack(new).unbind(1)
    naive = naive_paged_attention(
        inputs.query, key, value, cache.clone(), [3, 4, 1], seq_lens.tolist(), table.tolist(), case.scale
    )
    assert error(paged_prefill_torch(inputs.query, cache, table, starts, seq_lens, case.scale), naive) < 1e-12


def test_a_step_of_decodes_and_chunks_is_attended_to_as_one() -> None:
    """From the runner's arrays: two decodes, a first token alone, and two chunks; and steps of one kind."""
    for sequences in (((9, 1), (70, 1), (0, 1), (4, 5), (0, 3)), ((3, 1), (8, 1)), ((0, 7),)):
        case = AttentionCase(sequences)
        inputs = make_inputs(case)
        query_lens = np.array([new for _, new in sequences])
        batch = build_device_batch(
            query_lens,
            np.array([cached + new for cached, new in sequences]),
            inputs.block_table.numpy().astype(np.int64),
            block_size=case.block_size,
            device=torch.device("cpu"),
        )
        decodes = [cached + new for cached, new in sequences if cached and new == 1]
        assert batch.num_decodes == len(decodes)
        assert batch.max_seq_len == max(decodes, default=1)
        exact = inputs.in_float64()
        expected = paged_prefill_torch(
            exact.query, exact.layer_cache, exact.block_table, exact.query_starts, exact.seq_lens, case.scale
        )
        assert error(attend(inputs.query, inputs.layer_cache, batch, case.scale), expected) < BOUNDS[case.dtype]
        positions = [p for cached, new in sequences for p in range(cached, cached + new)]
        owners = np.repeat(np.arange(len(sequences)), query_lens)
        assert batch.slots.tolist() == [
            int(inputs.block_table[i, p // case.block_size]) * case.block_size + p % case.block_size
            for i, p in zip(owners, positions, strict=True)
        ]


def test_splits_fill_the_device_and_no_more() -> None:
    assert choose_num_splits(264, 32, 264) == 1
    assert choose_num_splits(264, 128, 264) == 4  # a short sequence's neighbour may be this long
    assert choose_num_splits(8, 1, 264) == 1
    assert choose_num_splits(8, 1000, 264) == 33
    assert 1 <= choose_num_splits(1, 100_000, 264) <= 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 2, 300)}, r"\(1, 2, 300\)"),
        ({"query": torch.zeros(1, 3, 16)}, r"\(1, 3, 16\)"),
        ({"query": torch.zeros(1, 4, 16, dtype=torch.float64)}, "float64"),
        ({"query": torch.zeros(1, 4, 16, dtype=torch.bfloat16)}, "bfloat16 over a cache of torch.float32"),
        ({"query": torch.zeros(1, 4, 32)[:, :, ::2]}, "contiguous"),
        ({"query": torch.zeros(2, 4, 16)}, "2 queries for 1"),
        ({"layer_cache": torch.zeros(2, 2, 4, 2, 16).to(torch.float8_e4m3fn)}, "scales"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, r"block table \(2, 1\) for 1"),
        ({"soft_cap": -1.0}, "soft cap -1.0"),
        ({"cache_scales": torch.ones(2, 2)}, "scales belong"),
    ],
)
def test_what_the_kernels_were_not_made_for_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "query": torch.zeros(1, 4, 16),
        "layer_cache": torch.zeros(2, 2, 4, 2, 16),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        paged_decode(**{**arguments, **change})  # type: ignore[arg-type]
