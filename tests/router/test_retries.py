"""How much the router may try again: never more than its budget, never without end."""

from __future__ import annotations

import pytest

from router.retries import MAX_BROKEN, MAX_FAILURES, Allowance, RetryBudget, backoff_s


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drain(budget: RetryBudget) -> int:
    spent = 0
    while budget.spend():
        spent += 1
    return spent


def test_the_budget_ends_and_comes_back_with_time_and_requests() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    full = drain(budget)
    assert 50 <= full <= 200
    clock.now_s = 1.0
    assert drain(budget) == 10
    for _ in range(50):
        budget.earn()
    assert drain(budget) == pytest.approx(10, abs=1)
    clock.now_s = 1e6
    assert drain(budget) == full


def test_every_request_may_make_up_for_one_loss_even_where_nothing_is_left() -> None:
    budget = RetryBudget(Clock())
    drain(budget)
    for _ in range(3):  # a worker takes many with it; all of them together earn no retry
        allowance = Allowance(budget)
        assert not allowance.may_retry
        assert allowance.take(was_lost=True, is_broken=False)
        assert not allowance.take(was_lost=True, is_broken=False)
    assert not Allowance(budget).take(was_lost=False, is_broken=False)


def test_one_request_does_not_meet_every_worker() -> None:
    budget = RetryBudget(Clock())
    lost = Allowance(budget)
    assert [lost.take(was_lost=True, is_broken=False) for _ in range(MAX_FAILURES)] == [True] * (MAX_FAILURES - 1) + [
        False
    ]
    broken = Allowance(budget)
    assert [broken.take(was_lost=False, is_broken=True) for _ in range(MAX_BROKEN)] == [True] * (MAX_BROKEN - 1) + [
        False
    ]


def test_the_first_retry_is_at_once_and_later_ones_are_spread() -> None:
    assert backoff_s(0) == backoff_s(1) == 0.0
    for failures in range(2, 12):
        waits = [backoff_s(failures) for _ in range(200)]
        assert 0.0 <= min(waits) < max(waits) <= 1.0
        assert max(waits) > 2 * min(waits)
