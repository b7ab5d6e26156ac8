"""Both schedulers in turns, and what is made of the times."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.scheduler.ours import Ours
from benchmarks.scheduler.vllm_peer import Vllm
from benchmarks.scheduler.workload import Point, Stepper, requests_of
from connectors.ec.base import ECConnectorBase

#: Of vLLM's time; and of our own with an empty queue, which is to say: within what two runs of the same differ by.
GOAL, QUEUE_GOAL = 0.5, 1.2


class Row(msgspec.Struct, frozen=True):
    """One point. Microseconds are of one step, and medians over all steps but for `p99`. `ratio`: ours to vLLM's;
    `to_empty`: ours to ours with nobody waiting; both medians of the rounds."""

    running: int
    waiting: int
    case: str
    us: float
    us_p99: float
    vllm_us: float | None
    vllm_us_p99: float | None
    ratio: float | None
    ratio_quartiles: tuple[float, float] | None
    to_empty: float
    steps: int

    @property
    def reached(self) -> bool | None:
        """None where there is nothing to compare with."""
        return None if self.ratio is None else self.ratio <= GOAL

    @property
    def independent(self) -> bool:
        return self.to_empty <= QUEUE_GOAL


def rows_of(
    running: int,
    waitings: Sequence[int],
    turnover: bool,
    *,
    vllm: Vllm | None,
    rounds: int,
    steps: int,
    connector: ECConnectorBase,
) -> Iterator[Row]:
    """All lengths of the queue for one number of running requests, which take turns with each other too."""
    ours: dict[int, Stepper] = {}
    theirs: dict[int, Stepper] = {}
    for waiting in waitings:
        requests = requests_of(Point(running, waiting, turnover), rounds * steps)
        ours[waiting] = Ours(requests, connector)
        if vllm is not None:
            theirs[waiting] = vllm.start(requests)
    gc.collect()
    taken: dict[tuple[str, int], list[list[float]]] = {}  # who, waiting -> rounds of steps, in seconds
    for number in range(rounds):
        first = number % len(waitings)
        for waiting in (*waitings[first:], *waitings[:first]):
            turns = [("ours", ours), ("vllm", theirs)]
            for who, steppers in turns if number % 2 else reversed(turns):
                if steppers:
                    taken.setdefault((who, waiting), []).append(steppers[waiting].steps(steps))
    if vllm is not None:
        vllm.forget()
    for waiting in waitings:
        point = Point(running, waiting, turnover)
        yield row_of(point, taken["ours", waiting], taken["ours", waitings[0]], taken.get(("vllm", waiting)))


def row_of(point: Point, ours: list[list[float]], empty: list[list[float]], vllm: list[list[float]] | None) -> Row:
    """Of rounds of steps, in seconds; `empty`: ours with nobody waiting."""
    ratios = None if vllm is None else _ratios(ours, vllm)
    return Row(
        running=point.running,
        waiting=point.waiting,
        case=point.case,
        us=1e6 * _quantile(ours, 0.5),
        us_p99=1e6 * _quantile(ours, 0.99),
        vllm_us=None if vllm is None else 1e6 * _quantile(vllm, 0.5),
        vllm_us_p99=None if vllm is None else 1e6 * _quantile(vllm, 0.99),
        ratio=None if ratios is None else statistics.median(ratios),
        ratio_quartiles=None if ratios is None else _quartiles(ratios),
        to_empty=statistics.median(_ratios(ours, empty)),
        steps=sum(map(len, ours)),
    )


def _ratios(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    """Of the medians, round by round."""
    return [statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs, strict=True)]


def _quantile(rounds: list[list[float]], part: float) -> float:
    ordered = sorted(seconds for steps in rounds for seconds in steps)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
