"""Encoders share the work and images meet what is cached: the figures that were promised, simulated."""

from __future__ import annotations

import pytest

from benchmarks.balance import Result, moved, simulate


def figures(result: Result) -> tuple[float, float, float, float]:
    return result.busiest, result.least_busy, result.met, result.hits


@pytest.fixture(scope="module")
def promised() -> Result:
    """16 encoders of 200 items, 10,000 images, Zipf 1.0, 100,000 requests."""
    return simulate()


def test_no_encoder_has_much_more_than_its_share(promised: Result) -> None:
    assert promised.busiest <= 1.25


def test_what_is_cached_somewhere_is_met(promised: Result) -> None:
    assert promised.met >= 0.9


def test_it_is_hashing_that_does_it(promised: Result) -> None:
    # Without it, as many items are cached and nobody finds them; else the figures above would say nothing.
    spread = simulate("least-loaded", requests=20_000)
    assert spread.met < 0.8 < promised.met
    assert spread.hits < promised.hits


@pytest.mark.parametrize(("encoders", "in_hand", "zipf"), [(16, 1, 1.0), (4, 32, 1.0), (16, 64, 0.7), (16, 32, 1.2)])
def test_other_loads_are_balanced_too(encoders: int, in_hand: int, zipf: float) -> None:
    result = simulate(encoders=encoders, in_hand=in_hand, zipf=zipf, requests=20_000)
    assert result.busiest <= 1.3  # fewer requests than were promised, so chance has more of a say
    assert result.met >= 0.9


def test_the_same_seed_gives_the_same_figures() -> None:
    assert figures(simulate(requests=2_000)) == figures(simulate(requests=2_000))


@pytest.mark.parametrize("encoders", [2, 4, 16])
def test_an_encoder_that_comes_or_goes_moves_its_own_share(encoders: int) -> None:
    added, removed = moved(encoders=encoders, keys=4_000)
    assert 0 < added <= 2 / encoders
    assert 0 < removed <= 2 / encoders
