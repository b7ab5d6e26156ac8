"""Processors: how many this process may use, and whether a step needs them all."""

from __future__ import annotations

import os
from pathlib import Path

#: Of an item on its way: who receives it, and who sends it, if that is on this machine.
_OF_A_LOAD = 2


class Crowding:
    """Whether a step computes just now and leaves fewer processors than a load would take. Called by any thread."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: that a step computes with."""
        self._leaves_too_few = usable_processors() < num_threads + _OF_A_LOAD
        self.is_stepping = False  # the step thread's to set

    def __call__(self) -> bool:
        return self.is_stepping and self._leaves_too_few


def usable_processors(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Those that the system lets this process run on, or the share of them that its container may use, of cgroups v2
    or v1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / name).read_text() for name in names).split()
            return allowed if quota in ("max", "-1") else min(allowed, int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return allowed
