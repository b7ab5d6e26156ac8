"""One worker after the other is disturbed, under load, while all others are well."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.faults import FAULTS, SILENT
from benchmarks.chaos.load import Load, Question
from cli.cluster import STAGES

#: A worker that was disturbed is reckoned with again by then.
_HEALED_S = 60.0
_EMPTY_S = 60.0
_SILENT_FACTOR = 3


@dataclass
class Report:
    """What came of a campaign."""

    num_requests: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)  # "fault at stage: error"
    slowest_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    retries: dict[str, int] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    def errors_of(self, *stages: str) -> int:
        """Of requests that ended while a worker of these stages was disturbed."""
        return sum(n for what, n in self.errors.items() if any(f"at {stage}:" in what for stage in stages))


class Campaign:
    """`run` once. Every stage of the cluster has two workers or more."""

    def __init__(self, cluster: ChaosCluster, asked: list[Question], *, concurrency: int, seed: int = 0) -> None:
        self._cluster = cluster
        self._load = Load(cluster.router, asked, concurrency)
        self._questions = asked
        self._random = random.Random(seed)
        self._times: list[tuple[float, float, str]] = []
        self._gone: set[tuple[str, int]] = set()

    def run(
        self,
        plan: Sequence[tuple[str, str]],
        *,
        hold_s: float,
        last: Sequence[tuple[str, str]] = (),
        min_requests: int = 0,
        deadline_s: float = float("inf"),
        say: Callable[[str], object] = lambda line: None,
    ) -> Report:
        """Do each (stage, fault) of the plan to some worker, `hold_s` seconds long and three times as long what is
        silent, until all of them and `min_requests` requests are done, or `deadline_s` seconds are over. What is done
        `last` stays done, so it must leave a worker of every stage."""
        self._load.learn()
        began_s = time.monotonic()
        self._load.start()
        try:
            for stage, name in plan:
                if time.monotonic() - began_s > deadline_s:
                    break
                say(f"{time.monotonic() - began_s:6.1f} s  {name} at {stage}; {len(self._load.ended)} requests so far")
                self._disturb(stage, name, hold_s)
            for stage, name in last:
                self._disturb(stage, name, hold_s, heals=False)
            while len(self._load.ended) < min_requests and time.monotonic() - began_s < deadline_s:
                time.sleep(0.1)
        finally:
            self._load.stop()
        return self._report(time.monotonic() - began_s)

    def _disturb(self, stage: str, name: str, hold_s: float, *, heals: bool = True) -> None:
        index = self._random.randrange(len(self._cluster.workers[stage]))
        # Not at the same moment of every request's life.
        time.sleep(self._random.uniform(0.0, 0.3))
        began_s = time.monotonic()
        if name in SILENT:
            hold_s *= _SILENT_FACTOR
        heal = FAULTS[name](self._cluster, stage, index)
        if not heals:
            time.sleep(hold_s)
            self._gone.add((stage, index))
            self._times.append((began_s, float("inf"), f"{name} at {stage}"))
            return
        try:
            time.sleep(hold_s)
        finally:
            heal()
        self._await(lambda: self._cluster.serves(stage, index), f"{stage}-{index} after {name}")
        self._await(self._all_counted, f"the router to count on {stage}-{index} after {name}")
        self._times.append((began_s, time.monotonic(), f"{name} at {stage}"))

    def _all_counted(self) -> bool:
        counts = self._cluster.routers_count()
        return sum(counts.values()) == sum(len(workers) for workers in self._cluster.workers.values())

    @staticmethod
    def _await(condition: Callable[[], bool], what: str, timeout_s: float = _HEALED_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}")
            time.sleep(0.05)  # it lives in another process; there is no event to await

    def _report(self, seconds: float) -> Report:
        report = Report(num_requests=len(self._load.ended), seconds=seconds)
        report.faults.update(what for _, _, what in self._times)
        for ended in self._load.ended:
            report.slowest_s = max(report.slowest_s, ended.seconds)
            at_s = ended.began_s + ended.seconds
            during = [what for begin_s, end_s, what in self._times if ended.began_s <= end_s and begin_s <= at_s]
            if ended.error:
                report.errors[f"{during[-1] if during else 'nothing amiss'}: {ended.error}"] += 1
            elif ended.answer != self._questions[ended.question].expected:
                expected = self._questions[ended.question].expected
                report.wrong.append(f"question {ended.question} during {during}: {ended.answer} is not {expected}")
        report.leaks = self._leaks()
        counters = self._cluster.load("router", 0).counters
        report.retries = {name: n for name, n in sorted(counters.items()) if name.startswith("router_retries") and n}
        return report

    def _leaks(self) -> list[str]:
        held: list[str] = []

        def is_empty() -> bool:
            held[:] = self._held()
            return not held

        try:
            self._await(is_empty, "everything to be empty", _EMPTY_S)
        except TimeoutError:
            return held
        return []

    def _held(self) -> list[str]:
        held = []
        everyone = [("router", 0), *((s, i) for s in STAGES for i in range(len(self._cluster.workers[s])))]
        for stage, index in everyone:
            if (stage, index) in self._gone:
                continue
            try:
                load = self._cluster.load(stage, index)
            except grpc.RpcError as error:
                held.append(f"{stage}-{index} does not answer: {error.code()}")
                continue
            for name in (
                "num_requests_running", "num_requests_waiting", "kv_blocks_held", "kv_leases",
                "encoder_cache_bytes_held",
            ):  # fmt: skip
                if value := getattr(load, name):
                    held.append(f"{stage}-{index} {name}={value}")
        return held
