"""What was measured, for people (a table, a plot) and for programs (JSON)."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.kernels.measuring import Ceilings, Row

_DISTRIBUTIONS = ("torch", "triton", "transformers", "numpy")
HEADER = (
    f"{'kernel':16}{'shape':44}{'µs':>10}{'GB/s':>8}{'TFLOP/s':>9}{'share':>7} {'of':7}{'goal':>5}  "
    "PyTorch, times as long"
)


def describe_machine(device: torch.device) -> dict[str, str]:
    found = {"device": "CPU, interpreter", "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def line_of(row: Row) -> str:
    goal = "" if row.goal is None else f"{row.goal:.0%}"
    others = [f"{name} {us / row.time_us:.2f}" for name, us in row.others_us.items()]
    others += [f"{name} did not run" for name in row.failed]
    missed = "  MISSED" if row.reached is False else ""
    return (
        f"{row.kernel:16}{row.shape:44}{row.time_us:10.1f}{row.gb_per_s:8.0f}{row.tflop_per_s:9.1f}{row.share:7.0%} "
        f"{row.ceiling:7}{goal:>5}  {', '.join(others)}{missed}"
    ).rstrip()


def to_json(machine: dict[str, str], ceilings: Ceilings, worst_errors: dict[str, float], rows: Sequence[Row]) -> str:
    raw = {
        "machine": machine,
        "ceilings": asdict(ceilings),
        "worst_errors": worst_errors,
        "rows": [{**asdict(row), "reached": row.reached} for row in rows],
    }
    return json.dumps(raw, indent=2) + "\n"


def write_plot(rows: Sequence[Row], file: Path) -> None:
    """A bar a case, as share of its ceiling; goals and PyTorch's as marks on it. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    axes.barh(places, [row.share for row in rows], color=["C0" if row.ceiling == "copy" else "C1" for row in rows])
    markers: dict[str, str] = {}
    for place, row in zip(places, rows, strict=True):
        for name, us in row.others_us.items():
            marker = markers.setdefault(name, "osD^vPX*"[len(markers) % 8])
            axes.plot(row.share * row.time_us / us, place, marker, color="k", markersize=4)
        if row.goal is not None:
            axes.plot([row.goal, row.goal], [place - 0.4, place + 0.4], color="C3")
    for name, marker in markers.items():
        axes.plot([], [], marker, color="k", markersize=4, label=name)
    axes.set_yticks(places, [f"{row.kernel}  {row.shape}" for row in rows], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("share of the ceiling: copy bandwidth (blue) or matrix rate (orange); goals in red")
    if markers:
        axes.legend(fontsize=7)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=120)
