"""Which blocks of an arena to take: stretches of numbers, as few as can be, for each is a copy of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def runs_of(blocks: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, how many) of each stretch without a gap."""
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    for run in np.split(blocks, breaks):
        yield int(run[0]), len(run)


def choose(free: NDArray[np.intp], num_blocks: int) -> NDArray[np.intp]:
    """`num_blocks` of the `free` ones, ascending: the first stretch if it is long enough, else the smallest one that
    is, else as few stretches as can be."""
    if free[num_blocks - 1] - free[0] == num_blocks - 1:  # as it is mostly, and quicker to see than to search for
        return free[:num_blocks]
    breaks = np.flatnonzero(np.diff(free) != 1) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(free)])))
    fitting = np.flatnonzero(lengths >= num_blocks)
    if len(fitting):
        start = starts[fitting[np.argmin(lengths[fitting])]]
        return free[start : start + num_blocks]
    chosen, missing = [], num_blocks
    for run in np.argsort(-lengths, kind="stable").tolist():
        taken = free[starts[run] : starts[run] + min(int(lengths[run]), missing)]
        chosen.append(taken)
        missing -= len(taken)
        if not missing:
            break
    return np.sort(np.concatenate(chosen))
