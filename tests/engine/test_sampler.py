"""Sampled tokens follow the distribution asked for and depend on seed, position and their own logits alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.types import SamplingParams
from engine.sampler import SamplingBatch, _first, sample
from kernels.race import _signed, mix, mix_int, race_key

GREEDY = SamplingParams(temperature=0.0)
_MASK64 = (1 << 64) - 1


def _logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _naive(
    logits: list[float], params: SamplingParams, output_index: int, seed: int, forbid: Sequence[int] = ()
) -> int:
    """The sampler in plain Python, from its description; one row, float64."""
    values = [-math.inf if token in forbid else value for token, value in enumerate(logits)]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature < 1e-5:
        return order[0]
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp((values[token] - values[order[0]]) / params.temperature) for token in order]
    total = sum(weights)
    kept: list[tuple[int, float]] = []
    before = 0.0
    for token, weight in zip(order, weights, strict=True):
        if params.top_p < 1 and kept and before >= params.top_p:
            break
        kept.append((token, weight))
        before += weight / total
    base = race_key(seed, output_index)

    def noise(token: int) -> float:
        value = (base + (token + 1) * 0x9E3779B97F4A7C15) & _MASK64
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
        return -math.log((((value ^ value >> 31) >> 11) + 0.5) * 2.0**-53)

    return max(kept, key=lambda entry: entry[1] / noise(entry[0]))[0]


def _frequencies(logits: torch.Tensor, params: SamplingParams, draws: int) -> torch.Tensor:
    """How often each token comes, over seeds and output indices."""
    rows = logits.expand(draws, -1)
    seeds = [draw // 16 for draw in range(draws)]
    indices = [draw % 16 for draw in range(draws)]
    tokens = sample(rows, [params] * draws, indices, seeds, [()] * draws)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[0]).double()


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    inside = expected > 0
    assert counts[~inside].sum() == 0
    return float((((counts - expected) ** 2)[inside] / expected[inside]).sum())


# 99.9 % points of the chi-square distribution; the draws are a fixed function of the seeds, so this never flickers.
@pytest.mark.parametrize(
    ("params", "kept", "bound"),
    [
        (SamplingParams(temperature=1.0), 6, 20.5),
        (SamplingParams(temperature=0.5), 6, 20.5),
        (SamplingParams(temperature=1.7), 6, 20.5),
        (SamplingParams(temperature=1.0, top_k=3), 3, 13.8),
        (SamplingParams(temperature=1.0, top_p=0.75), 3, 13.8),
        (SamplingParams(temperature=1.5, top_k=4, top_p=0.8), 3, 13.8),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams, kept: int, bound: float) -> None:
    logits = torch.tensor([1.0, 0.2, 2.0, 1.5, -1.0, 0.9])
    probabilities = (logits / params.temperature).softmax(-1)
    probabilities[probabilities.argsort(descending=True)[kept:]] = 0
    assert _chi_square(_frequencies(logits, params, 20_000), probabilities / probabilities.sum()) < bound


def test_warping_is_that_of_transformers() -> None:
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = _logits(1, 40, seed=3)
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    scores = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(12)(None, scores))
    allowed = set(torch.nonzero(scores[0] > -math.inf).flatten().tolist())
    counts = _frequencies(logits[0], SamplingParams(temperature=0.7, top_k=12, top_p=0.9), 20_000)
    assert set(torch.nonzero(counts).flatten().tolist()) == allowed


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(0, _MASK64),
    st.integers(0, 5000),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 7, 500, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
)
def test_equals_the_naive_twin(
    seed: int, row_seed: int, index: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = _logits(1, 33, seed=seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    forbid = [int(logits.argmax()), 5]
    expected = _naive(logits[0].tolist(), params, index, row_seed, forbid)
    assert sample(logits, [params], [index], [row_seed], [forbid]) == [expected]


def test_a_row_does_not_depend_on_the_others_nor_on_their_order() -> None:
    kinds = [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(temperature=0.6, top_p=0.7),
        SamplingParams(temperature=2.0, top_k=40, top_p=0.99),
    ]
    rows = 30
    logits = _logits(rows, 300)
    params = [kinds[row % len(kinds)] for row in range(rows)]
    indices = [row * 7 for row in range(rows)]
    seeds = [row * 1_000_003 for row in range(rows)]
    forbid: list[Sequence[int]] = [[int(logits[row].argmax())] if row % 2 else () for row in range(rows)]
    together = sample(logits, params, indices, seeds, forbid)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(
        logits[order],
        [params[row] for row in order],
        [indices[row] for row in order],
        [seeds[row] for row in order],
        [forbid[row] for row in order],
    )
    assert shuffled == [together[row] for row in order]
    for row in range(rows):
        alone = sample(logits[row : row + 1], [params[row]], [indices[row]], [seeds[row]], [forbid[row]])
        assert alone == [together[row]]


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(200, 1000)
    params = [SamplingParams()] * 200
    none: list[Sequence[int]] = [()] * 200
    first = sample(logits, params, list(range(200)), [7] * 200, none)
    assert sample(logits, params, list(range(200)), [7] * 200, none) == first
    assert len(set(first)) > 150
    other = sample(logits, params, list(range(200)), [8] * 200, none)
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 10


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(temperature=1e-7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_settings_are_greedy_even_among_equal_logits(params: SamplingParams, dtype: torch.dtype) -> None:
    logits = _logits(50, 400).to(dtype)
    best = logits.amax(dim=-1)
    logits[torch.arange(50), torch.arange(50) + 300] = best
    logits[torch.arange(50), torch.arange(50) + 100] = best
    expected = [min(torch.nonzero(row == row.max()).flatten().tolist()) for row in logits]
    assert sample(logits, [params] * 50, [3] * 50, list(range(50)), [()] * 50) == expected


def test_forbidden_tokens_never_come_and_the_logits_stay_as_they_are() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]]).repeat(400, 1)
    before = logits.clone()
    params = [GREEDY if row < 200 else SamplingParams(temperature=2.0) for row in range(400)]
    # Ids outside the vocabulary, as a client's stop tokens may be, must neither fail nor hit another row.
    tokens = sample(logits, params, [0] * 400, list(range(400)), [(1, 2, 4, 10**6, -1)] * 400)
    assert set(tokens[:200]) == {3}
    assert set(tokens[200:]) == {0, 3}
    assert torch.equal(logits, before)
    assert sample(logits[:1], [GREEDY], [0], [0], [(99,)]) == [1]


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-math.inf, -5.0, -math.inf]])
    for temperature in (2e-5, 0.01, 2.0):
        params = [SamplingParams(temperature=temperature, top_p=0.9)] * 2
        assert sample(logits, params, [0, 0], [1, 2], [(), ()]) == [0, 1]


def test_selection_ranks_as_sorting_does() -> None:
    scores = _logits(20, 200).round()  # many equal ones
    scores[scores == 0] *= torch.tensor([1.0, -1.0]).repeat(500)[: int((scores == 0).sum())]
    scores[3, 10:] = -math.inf
    expected = scores.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 7, 200):
        assert torch.equal(_first(scores, count), expected[:, :count])


def test_rows_must_agree() -> None:
    with pytest.raises(ValueError, match="2 indices"):
        SamplingBatch([GREEDY], [0, 1], [0], [()])
    with pytest.raises(ValueError, match="3 rows of logits"):
        SamplingBatch([GREEDY], [0], [0], [()]).sample(torch.zeros(3, 4))


def test_the_hash_on_tensors_is_the_one_on_integers() -> None:
    # 1234567 and its first output are SplitMix64's published test vector.
    assert mix_int(1234567) == 6457827717110365317
    values = [0, 1, 2**63, _MASK64, 0x0123456789ABCDEF]
    tensor = torch.tensor([_signed((value + 0x9E3779B97F4A7C15) & _MASK64) for value in values])
    assert mix(tensor).tolist() == [_signed(mix_int(value)) for value in values]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_device_draws_the_same() -> None:
    logits = _logits(64, 5000)
    params = [SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(top_k=50), GREEDY] * 16
    arguments = (params, list(range(64)), list(range(64)), [()] * 64)
    assert sample(logits.cuda(), *arguments) == sample(logits, *arguments)
