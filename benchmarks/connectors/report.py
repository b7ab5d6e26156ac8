"""What was measured, for people (a table, a plot) and for programs (JSON)."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from benchmarks.connectors.measuring import Row

_DISTRIBUTIONS = ("torch", "numpy", "safetensors", "pyzmq", "redis", "hiredis", "xxhash")
_LARGE_BYTES = 8 << 20
HEADER = (
    f"{'':30}{'size':>9}{'µs':>10}{'GB/s':>8}  {'beside':22}{'GB/s':>7}{'ratio':>8}"
    f"{'quartiles':>14}{'goal':>7}  reached"
)


class Machine(msgspec.Struct, frozen=True):
    """What the figures depend on besides our code."""

    cores: int
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]
    torch_threads: int
    python: str
    distributions: dict[str, str]

    def describe(self) -> str:
        before, after = (", ".join(f"{value:.2f}" for value in load) for load in (self.load_before, self.load_after))
        versions = ", ".join(f"{name} {number}" for name, number in self.distributions.items())
        return (
            f"{self.cores} cores; load average {before} before, {after} after; threads: torch {self.torch_threads}, "
            f"connectors 1 a side\nPython {self.python}, {versions}"
        )


class Report(msgspec.Struct, frozen=True):
    """The whole of a run. `not_measured`: group -> why."""

    machine: Machine
    rows: list[Row]
    not_measured: dict[str, str]

    @property
    def misses(self) -> list[Row]:
        return [row for row in self.rows if row.reached is False]

    def summary(self) -> str:
        """How many goals were missed; large items apart, since what each item costs besides its bytes hides there."""
        large = [row for row in self.rows if row.size_bytes >= _LARGE_BYTES]
        parts = []
        for rows, where in ((self.rows, ""), (large, f", from {size_text(_LARGE_BYTES)} up")):
            with_goal = [row for row in rows if row.goal is not None]
            parts.append(f"{sum(row.reached is False for row in with_goal)} of {len(with_goal)} goals missed{where}")
        return "; ".join(parts)

    def to_json(self) -> bytes:
        raw = msgspec.to_builtins(self)
        for line, row in zip(raw["rows"], self.rows, strict=True):
            line["reached"] = row.reached
        return msgspec.json.format(msgspec.json.encode(raw), indent=2) + b"\n"


def machine_now(load_before: tuple[float, float, float], torch_threads: int) -> Machine:
    distributions = {}
    for name in _DISTRIBUTIONS:
        try:
            distributions[name] = version(name)
        except PackageNotFoundError:
            distributions[name] = "absent"
    return Machine(
        os.cpu_count() or 0, load_before, os.getloadavg(), torch_threads, platform.python_version(), distributions
    )


def line_of(row: Row) -> str:
    low, high = row.ratio_quartiles
    quartiles = f"{low:.0%}-{high:.0%}"
    goal = "" if row.goal is None else f"{row.goal:.0%}"
    reached = {None: "", True: "yes", False: "NO"}[row.reached]
    return (
        f"{row.case:30}{size_text(row.size_bytes):>9}{row.us_per_item:10.0f}{row.gb_per_s:8.2f}  {row.bound:22}"
        f"{row.bound_gb_per_s:7.2f}{row.ratio:8.0%}{quartiles:>14}{goal:>7}  {reached}"
    ).rstrip()


def size_text(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def write_plot(report: Report, file: Path) -> None:
    """One panel a case: rates by size, the bounds dashed. Needs matplotlib."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in report.rows))
    columns = min(3, len(cases))
    lines = -(-len(cases) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * lines), layout="constrained")
    for number, case in enumerate(cases):
        rows = [row for row in report.rows if row.case == case]
        axes = figure.add_subplot(lines, columns, number + 1)
        ours = {row.size_bytes: row.gb_per_s for row in rows}
        axes.plot(list(ours), list(ours.values()), marker="o", label="connector")
        for bound in dict.fromkeys(row.bound for row in rows):
            points = [row for row in rows if row.bound == bound]
            goals = sorted({row.goal for row in points if row.goal is not None})
            label = bound + "".join(f" (goal {goal:.0%})" for goal in goals)
            axes.plot(
                [row.size_bytes for row in points],
                [row.bound_gb_per_s for row in points],
                marker=".",
                linestyle="--",
                label=label,
            )
        sizes = sorted(ours)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=30, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("GB/s")
        axes.set_title(case, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)
