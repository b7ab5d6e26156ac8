"""One-line logs on standard error: plain for people, or JSON for whatever gathers them."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar
from typing import TextIO

import msgspec

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS = ("text", "json")

#: Of the request that the running task is about; whoever handles a call sets it. JSON lines show it.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def setup(level: str, where: str, form: str = "text") -> None:
    """Send all logs of this process to standard error, from `level` on. Call once, at the start of the process.

    A line reads `2026-01-31T12:00:00.123Z INFO encoder-0 services.runtime: text`: time in UTC, level, `where` (the
    name that timelines show), logger, text; only a traceback takes further lines. With `form` "json" it is one object
    with `time`, `level`, `where`, `logger`, `message`, and where there is one `request_id` and `traceback`.

    Raises ValueError for another level or form than those of `LEVELS` and `FORMATS`.
    """
    if level.upper() not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    if form not in FORMATS:
        raise ValueError(f"log format {form!r} is none of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(where) if form == "json" else _text_formatter(where))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # asyncio's debug lines name internals of the loop only.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def say(line: str, stream: TextIO) -> None:
    """One line in one write, flushed. `print` writes the line's end by itself where Python does not buffer, as in a
    container: whoever reads may take that for a second line, or put the lines of two processes into one."""
    stream.write(line + "\n")
    stream.flush()


def complain(message: str) -> None:
    """Say on standard error why this program ends, in one line."""
    say("error: " + " ".join(message.split()), sys.stderr)


def _text_formatter(where: str) -> logging.Formatter:
    # `where` is the operator's text and becomes part of a format string.
    shown = where.replace("%", "%%")
    formatter = logging.Formatter(
        fmt=f"%(asctime)s.%(msecs)03dZ %(levelname)s {shown} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    return formatter


class _JsonFormatter(logging.Formatter):
    """One object a record, whatever line ends its text has. Any thread."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "where": self._where,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if about := request_id.get():
            line["request_id"] = about
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        # A surrogate, which may come from a name of a file, is not text that JSON can have.
        return msgspec.json.encode(
            {key: value.encode(errors="replace").decode() for key, value in line.items()}
        ).decode()
