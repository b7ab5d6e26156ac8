"""Train the demo model: `python -m demo.training`. Goes on where it was stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from core.errors import ConfigError
from demo.training.loop import Run, Settings, keep_memory
from demo.training.plots import draw_plots
from demo.training.workers import Workers, start_others

_ROOT = Path(__file__).resolve().parent.parent.parent
_HAS_GPU = torch.cuda.is_available()
_END_S = 30.0  # for other workers to end by themselves


@click.command()
@click.option(
    "--model",
    type=click.Path(file_okay=False, path_type=Path),
    default=_ROOT / "demo" / "model",
    help="The checkpoint's folder.  [default: demo/model]",
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_ROOT / ".cache" / "training" / "state.safetensors",
    help="What a stopped run goes on from.  [default: .cache/training/state.safetensors]",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--device", default="cuda" if _HAS_GPU else "cpu", show_default="cuda where there is one, else cpu")
@click.option(
    "--workers",
    type=click.IntRange(1, 8),
    default=1 if _HAS_GPU else 2,
    show_default="1 with a GPU, else 2",
    help="Processes; each takes a part of every batch.",
)
@click.option("--resume/--anew", default=True, show_default=True, help="Go on from the saved state, if there is one.")
@click.option("--max-steps", type=click.IntRange(1), help="Stop after so many; a later call goes on.")
@click.option("--rank", type=click.IntRange(0), default=0, hidden=True)
@click.option("--meeting", type=click.Path(path_type=Path), hidden=True)
def main(
    model: Path,
    state: Path,
    seed: int,
    device: str,
    workers: int,
    resume: bool,
    max_steps: int | None,
    rank: int,
    meeting: Path | None,
) -> None:
    """Train, and write checkpoint and plots."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that other workers are ended too
    keep_memory()
    if device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    settings = Settings(model_dir=model, state_file=state, seed=seed, device=device)
    try:
        with _among_workers(rank, workers, meeting) as place:
            run = Run(settings, resume, place)
            run.train(max_steps)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    if run.finished and rank == 0:
        (model / "training.json").write_text(json.dumps(run.history) + "\n")
        draw_plots(run.history, model)


@contextlib.contextmanager
def _among_workers(rank: int, number: int, meeting: Path | None) -> Iterator[Workers]:
    """This process's place; the first one starts the others, and ends them."""
    with contextlib.ExitStack() as stack:
        others = []
        if meeting is None:
            meeting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="training."))) / "meeting"
            others = start_others(number, meeting, sys.argv[1:])
        try:
            workers = Workers(rank, number, meeting)
            yield workers
            workers.close()
            for other in others:
                other.wait(_END_S)
        finally:
            for other in others:
                if other.poll() is None:
                    other.kill()
                    other.wait()


if __name__ == "__main__":
    main()
