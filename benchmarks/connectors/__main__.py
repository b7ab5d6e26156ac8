"""Options, and one group of measurements after the other.

python -m benchmarks.connectors [--sizes 64KiB,8MiB] [--only redis,kv] [--repeat N] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from benchmarks.connectors.measuring import Row, Settings

_GROUPS = {
    "shared-memory": "shared_memory",
    "shared-storage": "shared_storage",
    "kv": "kv_pull",
    "redis": "redis_get",
    "ec-peer": "ec_peer",
}
_MIN_SIZE, _MAX_SIZE = 4 << 10, 256 << 20
_STEP = 256 << 10  # sizes above it are whole multiples of it, since KV blocks are of that size


def parse_sizes(_context: object, _option: object, text: str) -> list[int]:
    """`64KiB,1MiB` as bytes. Raises click.BadParameter."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(KiB|MiB)\s*", part)
        size = int(match[1]) << (10 if match[2] == "KiB" else 20) if match else 0
        if not _MIN_SIZE <= size <= _MAX_SIZE:
            raise click.BadParameter(f"{part!r} is not a size from 4KiB to 256MiB")
        if size % (_STEP if size > _STEP else _MIN_SIZE):
            raise click.BadParameter(f"{part!r} is not a multiple of {'256KiB' if size > _STEP else '4KiB'}")
        sizes.append(size)
    return sorted(set(sizes))


def parse_groups(_context: object, _option: object, text: str) -> list[str]:
    """Raises click.BadParameter."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _GROUPS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(_GROUPS)}")
    return [name for name in _GROUPS if name in names]


@click.command()
@click.option(
    "--sizes",
    default="64KiB,256KiB,1MiB,8MiB,64MiB,256MiB",
    show_default=True,
    callback=parse_sizes,
    help="Of an item, or of a pull.",
)
@click.option("--only", "groups", default=",".join(_GROUPS), show_default=True, callback=parse_groups)
@click.option(
    "--repeat", "rounds", type=click.IntRange(1, 1000), default=9, show_default=True, help="Rounds; the median counts."
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    default="/dev/shm",
    show_default=True,
    help="Memory-backed; holds what the measurements write, until they end.",
)
@click.option("--torch-threads", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw them here (PNG, SVG).")
@click.option("--check", is_flag=True, help="Exit with 1 where a goal was missed or could not be measured.")
def main(
    sizes: list[int],
    groups: list[str],
    rounds: int,
    folder: Path,
    torch_threads: int,
    json_file: Path | None,
    plot_file: Path | None,
    check: bool,
) -> None:
    """The connectors beside what the machine can do in the same run: rates by size, and how they compare."""
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("needs matplotlib, which the extra `dev` brings", param_hint="--plot")
    # Before torch is imported: what it is told later holds for one thread only, and the connectors have their own.
    os.environ["OMP_NUM_THREADS"] = str(torch_threads)
    import torch

    from benchmarks.connectors import report
    from benchmarks.connectors.measuring import Settings

    torch.set_num_threads(torch_threads)
    load_before = os.getloadavg()
    rows: list[Row] = []
    not_measured: dict[str, str] = {}
    click.echo(report.HEADER)
    with tempfile.TemporaryDirectory(prefix="triptych-bench-", dir=folder) as private:
        for group in groups:
            own = Path(private) / group
            own.mkdir()
            try:
                for row in _run(group)(sizes, Settings(rounds, own)):
                    rows.append(row)
                    click.echo(report.line_of(row))
            except _not_tried() as error:
                not_measured[group] = str(error)
                click.echo(f"{group}: not measured: {error}")
    result = report.Report(report.machine_now(load_before, torch_threads), rows, not_measured)
    click.echo(result.machine.describe())
    click.echo(result.summary())
    if json_file is not None:
        json_file.write_bytes(result.to_json())
    if plot_file is not None:
        report.write_plot(result, plot_file)
    if check and (result.misses or not_measured):
        sys.exit(1)


def _run(group: str) -> Callable[[Sequence[int], Settings], Iterator[Row]]:
    """Imported only when it is wanted: not everybody has every client."""
    rows: Callable[[Sequence[int], Settings], Iterator[Row]]
    rows = importlib.import_module(f"benchmarks.connectors.{_GROUPS[group]}").rows
    return rows


def _not_tried() -> type[Exception]:
    from connectors.conformance.harness import NotTriedError

    return NotTriedError


if __name__ == "__main__":
    main()
