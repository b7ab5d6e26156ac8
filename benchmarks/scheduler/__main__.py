"""Options, and one point after the other.

python -m benchmarks.scheduler [--running 1,32,256] [--waiting 0,1000,10000] [--vllm DIR] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

_MAX_REQUESTS = 100_000
#: Steps at one point: no request must reach the longest that both schedulers are told of.
_MAX_STEPS = 3500


def parse_counts(_context: object, option: click.Parameter, text: str) -> list[int]:
    """`1,32,256`. Raises click.BadParameter."""
    least = 1 if option.name == "runnings" else 0
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not least <= int(part) <= _MAX_REQUESTS:
            raise click.BadParameter(f"{part!r} is not a number from {least} to {_MAX_REQUESTS}")
        counts.append(int(part))
    return sorted(set(counts))


@click.command()
@click.option("--running", "runnings", default="1,32,256", show_default=True, callback=parse_counts)
@click.option("--waiting", "waitings", default="0,1000,10000", show_default=True, callback=parse_counts)
@click.option(
    "--cases",
    type=click.Choice(["both", "decode", "turnover"]),
    default="both",
    show_default=True,
    help="All requests decode, or they come and go.",
)
@click.option(
    "--vllm",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="TRIPTYCH_BENCH_VLLM",
    help="Where vLLM is installed: a folder with venv/bin/python. Absent: ours alone.  [env: TRIPTYCH_BENCH_VLLM]",
)
@click.option("--repeat", "rounds", type=click.IntRange(1, 1000), default=7, show_default=True, help="Rounds.")
@click.option("--steps", type=click.IntRange(1, 100), default=40, show_default=True, help="Steps of one a round.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw them here (PNG, SVG).")
@click.option("--check", is_flag=True, help="Exit with 1 where a goal was missed or vLLM could not be measured.")
def main(
    runnings: list[int],
    waitings: list[int],
    cases: str,
    folder: Path | None,
    rounds: int,
    steps: int,
    json_file: Path | None,
    plot_file: Path | None,
    check: bool,
) -> None:
    """What a step costs besides the model, ours beside vLLM's: by requests that run and requests that wait."""
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("needs matplotlib, which the extra `dev` brings", param_hint="--plot")
    if rounds * steps > _MAX_STEPS:
        raise click.BadParameter(f"with {steps} steps a round, {_MAX_STEPS // steps} at most", param_hint="--repeat")
    from benchmarks.connectors.report import machine_now
    from benchmarks.scheduler import report
    from benchmarks.scheduler.measuring import Row, rows_of
    from benchmarks.scheduler.ours import connector_in
    from benchmarks.scheduler.vllm_peer import NoVllmError, Vllm

    load_before = os.getloadavg()
    rows: list[Row] = []
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-bench-"))
        connector = connector_in(Path(store))
        stack.callback(connector.close)
        vllm, told = None, "not measured: no --vllm"
        if folder is not None:
            try:
                vllm = stack.enter_context(Vllm(folder))
                told = vllm.version
            except NoVllmError as error:
                told = f"not measured: {error}"
        click.echo(report.HEADER)
        for turnover in {"both": [False, True], "decode": [False], "turnover": [True]}[cases]:
            for running in runnings:
                for row in rows_of(
                    running, waitings, turnover, vllm=vllm, rounds=rounds, steps=steps, connector=connector
                ):
                    rows.append(row)
                    click.echo(report.line_of(row))
    result = report.Report(machine_now(load_before, 1), told, rows)
    click.echo(f"{result.machine.cores} cores, Python {result.machine.python}")
    click.echo(result.summary())
    if json_file is not None:
        json_file.write_bytes(result.to_json())
    if plot_file is not None:
        report.write_plot(result, plot_file)
    if check and (result.misses or vllm is None):
        sys.exit(1)


if __name__ == "__main__":
    main()
