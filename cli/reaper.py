"""The last resort of a local cluster: ends its processes when the one that started them is gone.

Started as a program with a pipe as its standard input. The starter writes one line for each process group (`+PGID` when
it starts, `-PGID` once it has ended it) and for a temporary folder (`dPATH`). When the pipe closes, because the starter
ended in whatever way, groups that are left get SIGTERM, and SIGKILL a little later; folders are removed.

A pipe, and not a parent-death signal: that one is sent when the starting *thread* ends, reaches only direct children,
and has to be armed between fork and exec.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

_GRACE_S = 5.0


def main() -> None:
    """Read until the pipe closes, then clean up. The only argument, optional, is the seconds before SIGKILL."""
    grace_s = float(sys.argv[1]) if len(sys.argv) > 1 else _GRACE_S
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        what, rest = line[0], line[1:].strip()
        if what == "+":
            groups.add(int(rest))
        elif what == "-":
            groups.discard(int(rest))
        elif what == "d":
            folders.append(rest)
    _signal(groups, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        groups = {group for group in groups if _exists(group)}
    _signal(groups, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _signal(groups: set[int], which: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, which)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
