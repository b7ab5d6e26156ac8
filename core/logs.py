"""Plain one-line logs on standard error."""

from __future__ import annotations

import logging
import sys
import time

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def setup(level: str, where: str) -> None:
    """Send all logs of this process to standard error, from `level` on. Call once, at the start of the process.

    A line reads `2026-01-31T12:00:00.123Z INFO encoder-0 services.runtime: text`: time in UTC, level, `where` (the
    name that timelines show), logger, text. Only a traceback takes further lines. Raises ValueError for another level
    than those of `LEVELS`.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    # `where` is the operator's text and becomes part of a format string.
    shown = where.replace("%", "%%")
    formatter = logging.Formatter(
        fmt=f"%(asctime)s.%(msecs)03dZ %(levelname)s {shown} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # asyncio's debug lines name internals of the loop only.
    logging.getLogger("asyncio").setLevel(logging.WARNING)
