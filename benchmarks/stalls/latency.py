"""Time between tokens of text requests in an engine: alone, beside each lane, and beside the same lane in a process of
its own, whose loads cost cores and memory as much and the interpreter lock nothing."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.stalls.lanes import STORES, Lane, RemoteLane
from connectors.conformance.harness import NotTriedError
from core.config import ConnectorConfig, EngineConfig
from core.types import ECRole, SamplingParams
from engine.executor.in_process import InProcessExecutor
from engine.inproc_client import InprocClient
from engine.protocol import EngineCoreRequest

#: Of the p99 with no load beside it.
GOAL = 1.2
ALONE = "alone"
_PROMPT_TOKENS = 64
_WARM_UP_STEPS = 4
_STEP_LIMIT_S = 30.0


class LatencyRow(msgspec.Struct, frozen=True):
    """Milliseconds from a step's tokens to the next one's. `to_alone`, `to_apart`: ratios of the p99, to the engine's
    without loads and to that beside the same loads in a process of their own."""

    beside: str
    ms_p50: float
    ms_p99: float
    to_alone: float
    apart_ms_p99: float | None
    to_apart: float | None
    loads: int
    ms_p99_of_rounds: list[float]
    steps: int

    @property
    def reached(self) -> bool | None:
        return None if self.beside == ALONE else self.to_alone <= GOAL


class TextEngine:
    """A whole engine on this thread, `num_requests` text requests at a time."""

    def __init__(self, model: Path, folder: Path, num_requests: int) -> None:
        connector = ConnectorConfig("ECSharedStorageConnector", None, {"shared_storage_path": str(folder)})
        self._client = InprocClient(
            EngineConfig(
                model=str(model),
                ec_role=ECRole.CONSUMER,
                ec_connector=connector,
                device="cpu",
                max_model_len=1024,
                max_num_seqs=num_requests,
                max_num_batched_tokens=512,
            )
        )
        self._num_requests = num_requests
        self._names = map("r{}".format, itertools.count())
        self._random = random.Random(0)

    def decode(self, num_steps: int, turn: Callable[[int], None]) -> list[float]:
        """Seconds between tokens, of so many steps. `turn` is called before each, with its number; the requests are new
        and are aborted then."""
        names = [next(self._names) for _ in range(self._num_requests)]
        for name in names:
            prompt = [self._random.randrange(20, 900) for _ in range(_PROMPT_TOKENS)]
            sampling = SamplingParams(temperature=0, max_tokens=num_steps + 2 * _WARM_UP_STEPS + 16, ignore_eos=True)
            self._client.add(EngineCoreRequest(name, time.time(), prompt_token_ids=prompt, sampling=sampling))
        while self._client.stats().num_running < len(names):
            self._step()
        for _ in range(_WARM_UP_STEPS):
            last_s = self._step()
        gaps = []
        for number in range(num_steps):
            turn(number)
            now_s = self._step()
            gaps.append(now_s - last_s)
            last_s = now_s
        for name in names:
            self._client.abort(name)
        while self._client.core.has_work:
            self._client.step()
        return gaps

    def is_crowded(self) -> bool:
        """Whether it computes just now, with no processor to spare."""
        executor = self._client.core.executor
        assert isinstance(executor, InProcessExecutor)
        return executor.worker.runner.crowding()

    def close(self) -> None:
        self._client.close()

    def _step(self) -> float:
        """Step until there are tokens; when they came. Raises RuntimeError where none do, or one ends."""
        deadline_s = time.monotonic() + _STEP_LIMIT_S
        while not (outputs := self._client.step()):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the engine makes no tokens")
        if any(output.finished for output in outputs):
            raise RuntimeError("a request ended that should have gone on")
        return time.perf_counter()


class Measured:
    """Gaps between tokens beside one lane, by round; beside none without one."""

    def __init__(self, lane: Lane | RemoteLane | None) -> None:
        self.lane = lane
        self.rounds: list[list[float]] = []

    def quantile(self, part: float) -> float:
        """In milliseconds, of all rounds together."""
        return 1e3 * quantile([gap for gaps in self.rounds for gap in gaps], part)


def measure(engine: TextEngine, all_measured: Sequence[Measured], *, rounds: int, steps: int, every: int) -> None:
    """All in turns, another one first in each round. A load is begun every so many steps."""
    for number in range(rounds):
        first = number % len(all_measured)
        for measured in (*all_measured[first:], *all_measured[:first]):
            lane = measured.lane
            if lane is None:
                measured.rounds.append(engine.decode(steps, _nothing))
            else:
                measured.rounds.append(engine.decode(steps, partial(_turn, lane, every)))
                lane.settle()


def row_of(name: str, here: Measured, alone: Measured, apart: Measured | None) -> LatencyRow:
    p99 = here.quantile(0.99)
    apart_p99 = None if apart is None else apart.quantile(0.99)
    return LatencyRow(
        beside=name,
        ms_p50=here.quantile(0.5),
        ms_p99=p99,
        to_alone=p99 / alone.quantile(0.99),
        apart_ms_p99=apart_p99,
        to_apart=None if apart_p99 is None else p99 / apart_p99,
        loads=0 if here.lane is None else here.lane.num_loads,
        ms_p99_of_rounds=[1e3 * quantile(gaps, 0.99) for gaps in here.rounds],
        steps=sum(map(len, here.rounds)),
    )


def rows(
    engine: TextEngine, names: Sequence[str], folder: Path, *, size_bytes: int, rounds: int, steps: int, every: int
) -> Iterator[LatencyRow | tuple[str, str]]:
    """`names` of STORES. One row each, the engine alone first; a pair (name, reason) for what cannot be had here."""
    with ExitStack() as stack:
        here = {ALONE: Measured(None)}
        apart: dict[str, Measured] = {}
        for number, name in enumerate(names):
            own = folder / str(number)
            own.mkdir()
            try:
                stored = STORES[name](own, size_bytes, stack)
            except NotTriedError as error:
                yield name, str(error)
                continue
            here[name] = Measured(Lane(stored, stack, engine.is_crowded))
            apart[name] = Measured(RemoteLane(stored, stack))
        measure(engine, [*here.values(), *apart.values()], rounds=rounds, steps=steps, every=every)
        for name, measured in here.items():
            yield row_of(name, measured, here[ALONE], apart.get(name))


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _turn(lane: Lane | RemoteLane, every: int, step: int) -> None:
    lane.turn(step % every == 0)


def _nothing(_step: int) -> None:
    """No load."""
