"""Plots of a training run: loss, and accuracy by kind of question."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_plots(history: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write `loss.png` and `accuracy.png`. Needs matplotlib, which the extra `train` brings."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    steps = [point["step"] for point in history]
    figure = Figure((8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, [point["loss"] for point in history], linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss", title="Loss (sum over the lessons of a step)", yscale="log")
    _mark_stages(axes, history)
    figure.savefig(folder / "loss.png", dpi=100)

    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = iter(colormaps["tab20"](range(20)))
    for name in sorted({name for point in history for name in point["accuracy"]}):
        own = [(point["step"], point["accuracy"][name]) for point in history if name in point["accuracy"]]
        axes.plot(*zip(*own, strict=True), label=name, linewidth=1.0, color=next(colours))
    title = "Answers wholly right, on pictures never seen before (moving averages, from zero at each stage)"
    axes.set(xlabel="step", ylabel="right")
    axes.set_title(title, fontsize=10)
    axes.legend(ncols=3, fontsize=8)
    _mark_stages(axes, history)
    figure.savefig(folder / "accuracy.png", dpi=100)


def _mark_stages(axes: Any, history: Sequence[dict[str, Any]]) -> None:
    for before, after in itertools.pairwise(history):
        if before["stage"] != after["stage"]:
            axes.axvline(after["step"], color="grey", linewidth=0.6, linestyle=":")
