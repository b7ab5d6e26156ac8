"""Options, and one table after the other.

python -m benchmarks.stalls [--only latency,holds] [--size 64] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from benchmarks.stalls.holds import HoldRow
    from benchmarks.stalls.latency import LatencyRow

_PARTS = ("latency", "holds")


def parse_parts(_context: object, _option: object, text: str) -> list[str]:
    """Raises click.BadParameter."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _PARTS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(_PARTS)}")
    return [name for name in _PARTS if name in names]


@click.command()
@click.option("--only", "parts", default=",".join(_PARTS), show_default=True, callback=parse_parts)
@click.option(
    "--mib", type=click.IntRange(1, 1024), default=64, show_default=True, help="MiB of an item, or of a pull."
)
@click.option("--repeat", "rounds", type=click.IntRange(1, 1000), default=7, show_default=True, help="Rounds.")
@click.option("--steps", type=click.IntRange(4, 400), default=40, show_default=True, help="Steps of one a round.")
@click.option("--every", type=click.IntRange(1, 400), default=8, show_default=True, help="Steps from load to load.")
@click.option("--lanes", default="", help="Names of those to load beside the engine, such as Redis,peer; absent: all.")
@click.option("--requests", "num_requests", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option(
    "--torch-threads",
    type=click.IntRange(1, 256),
    default=max(1, (os.cpu_count() or 1) - 1),
    show_default="all cores but one",
    help="Of the engine; what loads needs a core too.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkpoint's folder; absent: a random-weight Qwen3-VL of 270 million parameters.",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    default="/dev/shm",
    show_default=True,
    help="Memory-backed; holds what the measurements write, until they end.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--check", is_flag=True, help="Exit with 1 where a goal was missed or something could not be measured.")
def main(
    parts: list[str],
    mib: int,
    rounds: int,
    steps: int,
    every: int,
    lanes: str,
    num_requests: int,
    torch_threads: int,
    model: Path | None,
    folder: Path,
    json_file: Path | None,
    check: bool,
) -> None:
    """What the connectors' work in the background costs those who are served."""
    # Before torch is imported: what it is told later holds for one thread only.
    os.environ["OMP_NUM_THREADS"] = str(torch_threads)
    import torch

    from benchmarks.connectors.report import machine_now
    from benchmarks.stalls import report
    from core.interpreter import share_lock_often

    torch.set_num_threads(torch_threads)
    share_lock_often()
    load_before = os.getloadavg()
    latency: list[LatencyRow] = []
    holds: list[HoldRow] = []
    not_measured: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="triptych-bench-", dir=folder) as private:
        if "latency" in parts:
            click.echo(report.LATENCY_HEADER)
            for row in _latency(
                Path(private), model, num_requests, lanes, size_bytes=mib << 20, rounds=rounds, steps=steps, every=every
            ):
                if isinstance(row, tuple):
                    not_measured[row[0]] = row[1]
                else:
                    latency.append(row)
                    click.echo(report.latency_line(row))
        if "holds" in parts:
            from benchmarks.stalls import holds as holds_module

            own = Path(private) / "holds"
            own.mkdir()
            click.echo(report.HOLDS_HEADER)
            for hold in holds_module.rows(own, mib << 20, rounds):
                if isinstance(hold, tuple):
                    not_measured[hold[0]] = hold[1]
                else:
                    holds.append(hold)
                    click.echo(report.hold_line(hold))
    result = report.Report(machine_now(load_before, torch_threads), latency, holds, not_measured)
    click.echo(result.machine.describe())
    click.echo(result.summary())
    if json_file is not None:
        json_file.write_bytes(result.to_json())
    if check and (result.misses or not_measured):
        sys.exit(1)


def _latency(
    private: Path, model: Path | None, num_requests: int, wanted: str, **how: int
) -> Iterator[LatencyRow | tuple[str, str]]:
    """Raises click.BadParameter."""
    from benchmarks.model import bench_model
    from benchmarks.stalls.lanes import STORES
    from benchmarks.stalls.latency import TextEngine, rows

    names = [name.strip() for name in wanted.split(",")] if wanted else list(STORES)
    for name in names:
        if name not in STORES:
            raise click.BadParameter(f"{name!r} is none of {', '.join(STORES)}", param_hint="--lanes")
    (private / "engine").mkdir()
    engine = TextEngine(model or bench_model(), private / "engine", num_requests)
    try:
        yield from rows(engine, names, private, **how)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
