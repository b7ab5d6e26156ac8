"""What was measured, for people (two tables) and for programs (JSON)."""

from __future__ import annotations

import msgspec

from benchmarks.connectors.report import Machine
from benchmarks.stalls.holds import GOAL_MS, HoldRow
from benchmarks.stalls.latency import GOAL, LatencyRow

LATENCY_HEADER = (
    f"{'loads beside':16}{'p50 ms':>9}{'p99 ms':>9}{'to alone':>10}{'apart p99':>11}{'to apart':>10}{'loads':>7}"
    f"{'steps':>7}  reached"
)
HOLDS_HEADER = f"{'longest hold of the lock':34}{'ms':>8}{'least':>8}{'work ms':>9}{'rounds':>8}  reached"
_WORDS = {None: "", True: "yes", False: "NO"}


class Report(msgspec.Struct, frozen=True):
    """The whole of a run. `not_measured`: what -> why."""

    machine: Machine
    latency: list[LatencyRow]
    holds: list[HoldRow]
    not_measured: dict[str, str]

    @property
    def misses(self) -> list[str]:
        return [row.beside for row in self.latency if row.reached is False] + [
            row.what for row in self.holds if row.reached is False
        ]

    def summary(self) -> str:
        late = sum(row.reached is False for row in self.latency)
        long = sum(row.reached is False for row in self.holds)
        parts = [
            f"p99 above {GOAL:.0%} of the engine alone: {late} of {len(self.latency)}",
            f"holds of {GOAL_MS:g} ms or more: {long} of {len(self.holds)}",
            *(f"{what}: not measured: {why}" for what, why in self.not_measured.items()),
        ]
        return "; ".join(parts)

    def to_json(self) -> bytes:
        raw = msgspec.to_builtins(self)
        reached = {"latency": [row.reached for row in self.latency], "holds": [row.reached for row in self.holds]}
        for table, answers in reached.items():
            for line, answer in zip(raw[table], answers, strict=True):
                line["reached"] = answer
        return msgspec.json.format(msgspec.json.encode(raw), indent=2) + b"\n"


def latency_line(row: LatencyRow) -> str:
    apart_p99 = "" if row.apart_ms_p99 is None else f"{row.apart_ms_p99:.2f}"
    to_apart = "" if row.to_apart is None else f"{row.to_apart:.0%}"
    return (
        f"{row.beside:16}{row.ms_p50:>9.2f}{row.ms_p99:>9.2f}{row.to_alone:>10.0%}{apart_p99:>11}{to_apart:>10}"
        f"{row.loads:>7}{row.steps:>7}  {_WORDS[row.reached]}"
    ).rstrip()


def hold_line(row: HoldRow) -> str:
    return (
        f"{row.what:34}{row.ms:>8.2f}{row.ms_least:>8.2f}{row.ms_work:>9.1f}{row.rounds:>8}  {_WORDS[row.reached]}"
    ).rstrip()
