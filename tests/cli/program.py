"""Runs `triptych` as a process."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Ours, without options that the caller's shell may hold."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}


async def triptych(*args: str, timeout_s: float = 100) -> tuple[int, str, str]:
    """Exit code, standard output, standard error. Async, so that stub servers in this process can answer meanwhile."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", *args,
        cwd=ROOT, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    return process.returncode, out.decode(), err.decode()
