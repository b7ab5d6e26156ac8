"""Contenders that take turns, and the ratios between them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import msgspec

#: A timed loop moves about so many bytes, in at most so many turns: a small item alone is too short to time.
_LOOP_BYTES = 16 << 20
_MAX_TURNS = 32
_WARM_UP_ROUNDS = 2


class Settings(NamedTuple):
    """What all measurements are told."""

    rounds: int
    folder: Path  # an empty one, memory-backed; whoever made it removes it


@contextlib.contextmanager
def as_is(_turns: int) -> Iterator[None]:
    """Nothing around it."""
    yield


class Contender(NamedTuple):
    """One way of moving an item. `work` moves one and is timed, in a loop of some turns; `around(turns)` is entered
    before and left after each such loop, untimed."""

    work: Callable[[], object]
    around: Callable[[int], AbstractContextManager[None]] = as_is


class Comparison(NamedTuple):
    """Contender `ours` beside contender `bound`. `goal`: the least ratio of their rates; None where there is none."""

    case: str
    ours: str
    bound: str
    goal: float | None


class Row(msgspec.Struct, frozen=True):
    """One line of the table. GB are 10^9 bytes."""

    case: str
    bound: str
    size_bytes: int
    us_per_item: float
    gb_per_s: float
    bound_gb_per_s: float
    ratio: float  # of the rates, ours to the bound's; median of the rounds
    ratio_quartiles: tuple[float, float]
    goal: float | None
    rounds: int
    turns: int  # items moved in one round

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.ratio >= self.goal


def measure(
    size_bytes: int, contenders: Mapping[str, Contender], comparisons: Sequence[Comparison], rounds: int
) -> list[Row]:
    """All contenders in turns, another one first in each round. Raises what they raise."""
    turns = max(1, min(_MAX_TURNS, _LOOP_BYTES // size_bytes))
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}  # of one item, by round
    for number in range(_WARM_UP_ROUNDS + rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            taken_s = _loop(contenders[name], turns)
            if number >= _WARM_UP_ROUNDS:
                seconds[name].append(taken_s)
    return [_compare(size_bytes, comparison, seconds, turns) for comparison in comparisons]


def _loop(contender: Contender, turns: int) -> float:
    """Seconds an item."""
    work = contender.work
    with contender.around(turns):
        begin_s = time.perf_counter()
        for _ in range(turns):
            work()
        return (time.perf_counter() - begin_s) / turns


def _compare(size_bytes: int, comparison: Comparison, seconds: Mapping[str, list[float]], turns: int) -> Row:
    ours, bound = seconds[comparison.ours], seconds[comparison.bound]
    ratios = [b / a for a, b in zip(ours, bound, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    ours_s, bound_s = statistics.median(ours), statistics.median(bound)
    return Row(
        case=comparison.case,
        bound=comparison.bound,
        size_bytes=size_bytes,
        us_per_item=ours_s * 1e6,
        gb_per_s=size_bytes / ours_s / 1e9,
        bound_gb_per_s=size_bytes / bound_s / 1e9,
        ratio=statistics.median(ratios),
        ratio_quartiles=(low, high),
        goal=comparison.goal,
        rounds=len(ratios),
        turns=turns,
    )
