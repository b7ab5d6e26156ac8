"""What a full engine says about when to come again follows from how fast requests left it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine import turnover
from engine.turnover import Turnover


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turnover, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_the_next_end_is_as_far_as_ends_were_apart(clock: Clock) -> None:
    room = Turnover()
    for _ in range(8):
        room.came()
    for held in (7, 6, 5, 4):
        clock.now_s += 3.0
        room.note(held)
    assert room.next_end_s() == pytest.approx(3.0, rel=0.4)


def test_time_without_requests_does_not_count(clock: Clock) -> None:
    room = Turnover()
    for _ in range(5):
        clock.now_s += 10.0
        room.came()
        clock.now_s += 0.5
        room.note(0)
    assert room.next_end_s() == pytest.approx(0.5, rel=0.1)


def test_before_the_first_end_it_is_a_guess(clock: Clock) -> None:
    room = Turnover()
    room.came()
    clock.now_s += 30.0
    assert room.next_end_s() == 1.0
