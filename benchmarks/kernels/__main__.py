"""Options; every kernel's correctness first, then the ceilings, then one group of measurements after the other.

python -m benchmarks.kernels [--only decode,prefill] [--json FILE] [--plot FILE] [--check]
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from benchmarks.kernels.measuring import Group, Row

#: Name -> module and function.
_GROUPS = {
    "decode": ("attention", "decode_cases"),
    "prefill": ("attention", "prefill_cases"),
    "traffic": ("traffic", "cases"),
    "layers": ("layers", "cases"),
    "model": ("model", "cases"),
}


def parse_groups(_context: object, _option: object, text: str) -> list[str]:
    """Raises click.BadParameter."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _GROUPS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(_GROUPS)}")
    return [name for name in _GROUPS if name in names]


@click.command()
@click.option("--only", "groups", default=",".join(_GROUPS), show_default=True, callback=parse_groups)
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="cpu: interpreter."
)
@click.option("--quick", is_flag=True, help="Tiny shapes, to try the code; the figures say nothing.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw them here (PNG, SVG).")
@click.option("--check", is_flag=True, help="Exit with 1 where a goal was missed.")
def main(
    groups: list[str], device: str, quick: bool, json_file: Path | None, plot_file: Path | None, check: bool
) -> None:
    """The kernels beside the device's ceilings and PyTorch's own. Exit 1 if one computes something wrong."""
    if device == "cpu":
        if not quick:
            raise click.BadParameter("only with --quick: the interpreter is for trying the code", param_hint="--device")
        # Before Triton is imported, which is when it counts.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("there is no GPU here; --device cpu --quick tries the code under the interpreter")

    from benchmarks.kernels import report
    from benchmarks.kernels.correctness import CHECKS
    from benchmarks.kernels.measuring import Sizes, measure, measure_ceilings

    sizes = Sizes(torch.device(device), quick)
    machine = report.describe_machine(sizes.device)
    click.echo(", ".join(f"{name} {value}" for name, value in machine.items()))

    worst_errors, wrong = {}, []
    for name, (run, bounds) in CHECKS.items():
        for dtype, bound in list(bounds.items())[: 1 if quick else None]:
            worst = run(sizes, dtype)
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            worst_errors[key] = worst
            right = worst <= bound  # which NaN is not
            click.echo(f"{'correct' if right else 'WRONG':8}{key:32}error {worst:.1e}, at most {bound:.1e}")
            if not right:
                wrong.append(key)
    if wrong:
        raise click.ClickException(f"wrong, so nothing is measured: {', '.join(wrong)}")

    ceilings = measure_ceilings(sizes)
    click.echo(
        f"ceilings: copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s (read plus written), "
        f"bf16 product {ceilings.matrix_flops_per_s / 1e12:.1f} TFLOP/s"
    )
    click.echo(report.HEADER)
    rows: list[Row] = []
    for name in groups:
        for case in _group(name)(sizes):
            row = measure(case, ceilings, sizes)
            rows.append(row)
            click.echo(report.line_of(row))
    for row in rows:
        for other, reason in row.failed.items():
            click.echo(f"{row.kernel}, {row.shape}: {other} did not run: {reason}")
    missed = [row for row in rows if row.reached is False]
    click.echo(f"{len(missed)} of {sum(row.goal is not None for row in rows)} goals missed")
    if json_file is not None:
        json_file.write_text(report.to_json(machine, ceilings, worst_errors, rows))
    if plot_file is not None:
        if importlib.util.find_spec("matplotlib") is None:
            click.echo(f"{plot_file} not drawn: matplotlib is not installed")
        else:
            report.write_plot(rows, plot_file)
    if check and missed:
        sys.exit(1)


def _group(name: str) -> Group:
    """Imported only when it is wanted."""
    module, function = _GROUPS[name]
    found: Group = getattr(importlib.import_module(f"benchmarks.kernels.{module}"), function)
    return found


if __name__ == "__main__":
    main()
