"""What was measured, for people (a table, a plot) and for programs (JSON)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.connectors.report import Machine
from benchmarks.scheduler.measuring import GOAL, QUEUE_GOAL, Row

HEADER = (
    f"{'requests':14}{'running':>8}{'waiting':>9}{'µs':>10}{'p99':>9}{'vLLM µs':>11}{'p99':>9}{'ratio':>8}"
    f"{'quartiles':>14}{'to none':>9}  reached"
)


class Report(msgspec.Struct, frozen=True):
    """The whole of a run. `vllm`: its version, or why it was not measured."""

    machine: Machine
    vllm: str
    rows: list[Row]

    @property
    def misses(self) -> list[Row]:
        return [row for row in self.rows if row.reached is False or not row.independent]

    def summary(self) -> str:
        compared = [row for row in self.rows if row.reached is not None]
        slow = sum(row.reached is False for row in compared)
        grown = sum(not row.independent for row in self.rows)
        return (
            f"vLLM {self.vllm}; {slow} of {len(compared)} points above {GOAL:.0%} of its time; "
            f"{grown} of {len(self.rows)} above {QUEUE_GOAL:.0%} of our own with nobody waiting"
        )

    def to_json(self) -> bytes:
        raw = msgspec.to_builtins(self)
        for line, row in zip(raw["rows"], self.rows, strict=True):
            line["reached"] = row.reached
            line["independent"] = row.independent
        return msgspec.json.format(msgspec.json.encode(raw), indent=2) + b"\n"


def line_of(row: Row) -> str:
    vllm_us = "" if row.vllm_us is None else f"{row.vllm_us:.0f}"
    vllm_p99 = "" if row.vllm_us_p99 is None else f"{row.vllm_us_p99:.0f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.0%}"
    quartiles = "" if row.ratio_quartiles is None else "{:.0%}-{:.0%}".format(*row.ratio_quartiles)
    problems = [
        *(["slower than the goal"] if row.reached is False else []),
        *([] if row.independent else ["grows with the queue"]),
    ]
    return (
        f"{row.case:14}{row.running:>8}{row.waiting:>9}{row.us:>10.0f}{row.us_p99:>9.0f}{vllm_us:>11}{vllm_p99:>9}"
        f"{ratio:>8}{quartiles:>14}{row.to_empty:>9.0%}  {'NO: ' + ', '.join(problems) if problems else 'yes'}"
    )


def write_plot(report: Report, file: Path) -> None:
    """One panel a case: time of a step by length of the queue, vLLM's dashed. Needs matplotlib."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in report.rows))
    figure = Figure(figsize=(5.2 * len(cases), 4.2), layout="constrained")
    for number, case in enumerate(cases):
        axes = figure.add_subplot(1, len(cases), number + 1)
        rows = [row for row in report.rows if row.case == case]
        for color, running in enumerate(dict.fromkeys(row.running for row in rows)):
            points = [row for row in rows if row.running == running]
            waiting = [row.waiting for row in points]
            axes.plot(waiting, [row.us for row in points], f"C{color}", marker="o", label=f"ours, {running} running")
            theirs = [(row.waiting, row.vllm_us) for row in points if row.vllm_us is not None]
            if theirs:
                label = f"vLLM, {running} running"
                axes.plot(*zip(*theirs, strict=True), f"C{color}", marker=".", linestyle="--", label=label)
        axes.set_xscale("symlog", linthresh=1000)
        axes.set_yscale("log")
        axes.set_xticks(sorted({row.waiting for row in rows}), [f"{w:,}" for w in sorted({r.waiting for r in rows})])
        axes.set_xlabel("waiting requests")
        axes.set_ylabel("µs a step, schedule() + update_from_output()")
        axes.set_title(f"requests: {case}", fontsize=10)
        axes.grid(alpha=0.3)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(file, dpi=120)
