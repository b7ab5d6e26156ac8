"""The sampling kernel draws what its twin draws from a sorted vocabulary in float64, and the engine's sampler without
either."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.types import SamplingParams
from engine.sampler import SamplingBatch
from kernels.sampling import sample, sample_torch


def columns(
    num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=torch.Generator().manual_seed(seed))
    return (
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k, dtype=torch.int32),
        torch.full((num_rows,), top_p, dtype=torch.float64),
        torch.full((num_rows,), min_p),
        keys,
    )


@settings(max_examples=20, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 63, 65, 1000, 4099]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 1000, 5000]),
    top_p=st.sampled_from([1.0, 1.0 - 1e-9, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    spread=st.sampled_from([0.5, 3.0, 40.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_twin(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float, seed: int
) -> None:
    logits = (torch.randn(2, vocab + 3, generator=torch.Generator().manual_seed(seed)) * spread)[:, :vocab]
    parameters = columns(2, temperature, top_k, top_p, min_p, seed)
    assert torch.equal(sample(logits, *parameters), sample_torch(logits, *parameters))


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.45), (40, 0.7)])
def test_of_equal_logits_the_lowest_ids_stay(top_k: int, top_p: float) -> None:
    """Three values over many tokens, and one over all: thresholds are amid ties."""
    for logits in (torch.randint(0, 3, (1, 300)).float(), torch.zeros(1, 300)):
        drawn = set()
        for seed in range(6):
            parameters = columns(1, 1.0, top_k, top_p, 0.0, seed)
            [token] = sample(logits, *parameters).tolist()
            assert [token] == sample_torch(logits, *parameters).tolist()
            drawn.add(token)
        assert len(drawn) > 1


def test_of_equal_logits_the_lowest_id_is_the_greedy_one() -> None:
    """Within a tile of the vocabulary, and in the same place of two."""
    for ties in ((3, 4, 2000), (5, 4096 + 5), (4096 + 2, 4096 + 7, 4096 + 3)):
        logits = torch.zeros(1, 4200)
        logits[0, list(ties)] = 2.0
        assert sample(logits, *columns(1, 0.0, 0, 1.0, 0.0, 0)).tolist() == [min(ties)]


def test_ties_go_on_from_one_tile_to_the_next() -> None:
    drawn = [int(sample(torch.zeros(1, 5000), *columns(1, 1.0, 90, 1.0, 0.0, seed))) for seed in range(5)]
    assert drawn == [int(sample_torch(torch.zeros(1, 5000), *columns(1, 1.0, 90, 1.0, 0.0, seed))) for seed in range(5)]
    assert max(drawn) < 90


def test_logits_one_step_of_float32_apart_are_told_apart() -> None:
    """The threshold is found to the last bit."""
    logits = torch.cat((torch.zeros(1), -4.0 - torch.arange(600) * 2.0**-21))[None]
    for seed in range(6):
        for top_k, top_p in ((100, 1.0), (0, 0.3)):
            parameters = columns(1, 1.0, top_k, top_p, 0.0, seed)
            assert torch.equal(sample(logits, *parameters), sample_torch(logits, *parameters))


def test_both_zeros_are_one() -> None:
    """The smallest float32 there is below the highest logit, halved by the temperature, is minus zero."""
    logits = torch.zeros(1, 40)
    logits[0, 30] = 2.0**-149
    for seed in range(4):
        parameters = columns(1, 2.0, 1, 1.0, 0.0, seed)
        assert sample(logits, *parameters).tolist() == sample_torch(logits, *parameters).tolist() == [0]


def test_what_has_no_weight_is_not_drawn_even_without_noise() -> None:
    """A key for which the uniform number of token 9 is 1: its noise would be zero, and zero by zero is no number."""
    multiplier, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    bits = mask
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        bits = bits ^ bits >> shift ^ bits >> 2 * shift
        bits = bits * pow(factor, -1, 1 << 64) & mask
    key = (bits - 10 * multiplier) & mask
    logits = torch.arange(10.0)[None].flip(1) * 200  # those after the first underflow
    rest = columns(1, 1.0, 0, 1.0, 0.0, 0)[:4]
    keys = torch.tensor([key - (1 << 64) if key >> 63 else key])
    assert sample(logits, *rest, keys).tolist() == sample_torch(logits, *rest, keys).tolist() == [0]
    # Where it has weight, it wins over what is twenty powers of ten above it.
    logits = torch.zeros(1, 10)
    logits[0, 0] = 30.0
    assert sample(logits, *rest, keys).tolist() == sample_torch(logits, *rest, keys).tolist() == [9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_parameters_of_their_own_are_drawn_as_by_the_engine(dtype: torch.dtype) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.5),
    ]
    logits = (torch.randn(5, 1500, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    before = logits.clone()
    forbid = [[int(row.argmax())] for row in logits]
    for index in range(3):
        batch = [SamplingBatch(params, [index] * 5, list(range(5)), forbid) for _ in range(2)]
        assert batch[0].sample(logits, sample) == batch[1].sample(logits)
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    assert sample(torch.empty(0, 8), *columns(0, 1.0, 0, 1.0, 0.0, 0)).shape == (0,)


def test_a_shape_that_is_not_supported_is_named() -> None:
    with pytest.raises(ValueError, match=r"logits \(2, 8\).*\(3,\)"):
        sample(torch.ones(2, 8), *columns(3, 1.0, 0, 1.0, 0.0, 0))
    with pytest.raises(ValueError, match=r"logits \(2, 8\) of strides \(1, 2\)"):
        sample(torch.ones(8, 2).T, *columns(2, 1.0, 0, 1.0, 0.0, 0))
