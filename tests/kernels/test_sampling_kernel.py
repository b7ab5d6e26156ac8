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
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    spread=st.sampled_from([0.5, 3.0, 40.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_twin(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float, seed: int
) -> None:
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(seed)) * spread
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
