"""Several processes that train one model: each computes gradients of its own pictures, and all apply the average.

On a CPU two processes of one thread are quicker than one of two: the operations are small, and threads would meet at
the end of each, processes only once a step.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from demo.questions import KINDS
from demo.training.lessons import Tally

_LESSONS = (*KINDS, "cells", "numbers", "things", "asked", "verdicts")
_TIMEOUT = datetime.timedelta(minutes=10)


class Workers:
    """This process's place among the workers. Its methods are called by all workers, in the same order.

    Args:
        rank: 0 for the first.
        number: of workers; with 1 nothing is exchanged.
        meeting: a file, absent at first, through which they find each other.

    Raises:
        RuntimeError: from any method, where another worker has died.
    """

    def __init__(self, rank: int, number: int, meeting: Path | None = None) -> None:
        self.rank = rank
        self.number = number
        if number > 1:
            method = f"file://{meeting}"
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=number, timeout=_TIMEOUT)

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        """In place."""
        if self.number == 1:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.number
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def add(self, tallies: Sequence[Tally]) -> Tally:
        """The sum of all workers' tallies."""
        counts = torch.zeros(len(_LESSONS), 2, dtype=torch.long)
        for tally in tallies:
            for name, pair in tally.items():
                counts[_LESSONS.index(name)] += torch.tensor(pair)
        if self.number > 1:
            dist.all_reduce(counts)
        return {name: (int(right), int(asked)) for name, (right, asked) in zip(_LESSONS, counts, strict=True) if asked}

    def close(self) -> None:
        if self.number > 1:
            dist.destroy_process_group()


def start_others(number: int, meeting: Path, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start workers 1 and up: this program with its own arguments, and their places."""
    command = [sys.executable, "-m", "demo.training", *arguments, "--meeting", str(meeting)]
    return [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, number)]
