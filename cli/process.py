"""One child process of a local cluster: its output, its ready line, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

_TAIL_LINES = 40
_LAST_WORDS_S = 0.5


class Child:
    """A program that prints `ready NAME key=HOST:PORT …` on its standard output once it serves.

    Leads a process group of its own, so that whatever it starts can be ended with it. What it prints goes line by line
    to the file `log_path`, or to our standard error behind its name; two daemon threads see to that while it lives.
    """

    def __init__(self, name: str, argv: Sequence[str], *, env: dict[str, str], log_path: Path | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.log_path = log_path
        self.addresses: dict[str, str] = {}  # what the ready line said
        self.env = env
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []

    @property
    def process(self) -> subprocess.Popen[str]:
        """Of the latest start."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def grpc(self) -> str:
        """HOST:PORT. Only once it is ready."""
        return self.addresses["grpc"]

    @property
    def metrics(self) -> str:
        """HOST:PORT of its /metrics. Only once it is ready."""
        return self.addresses["metrics"]

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    def tail(self) -> list[str]:
        """The last lines that it printed. Where it has just ended, waits a moment for what is still in the pipes."""
        if self._process is not None and self._process.poll() is not None:
            for thread in self._threads:
                thread.join(_LAST_WORDS_S)
        with self._lock:
            return list(self._tail)

    def start(self) -> int:
        """Start it, or start it again; returns its process group."""
        self._ready.clear()
        self._process = subprocess.Popen(  # noqa: S603 - a list of our own making, no shell
            self.argv,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        write = self._open_sink()
        self._threads = [
            threading.Thread(target=self._copy, args=(stream, is_stdout, write), name=f"{self.name}-out", daemon=True)
            for stream, is_stdout in ((self._process.stdout, True), (self._process.stderr, False))
        ]
        for thread in self._threads:
            thread.start()
        return self._process.pid

    def wait_ready(self, deadline: float) -> bool:
        """True once it is ready; False where it ended before, or `deadline` on the monotonic clock passed."""
        while not self._ready.wait(0.05):
            if time.monotonic() > deadline:
                return False
            if self.process.poll() is not None:
                return False
        return True

    def terminate(self) -> None:
        """SIGTERM, to the process itself: what it started is its own to stop."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """SIGKILL to the process and everything that it started. Without effect where all of it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait_ended(self, deadline: float) -> bool:
        """Wait for the process's end until `deadline`; then, or where only its children are left, kill the group.

        True where it ended by itself.
        """
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.kill_group()
            self._process.wait()

    def _open_sink(self) -> Callable[[str], None]:
        if self.log_path is None:
            return lambda line: print(f"[{self.name}] {line}", file=sys.stderr, flush=True)

        def append(line: str, path: Path = self.log_path) -> None:
            with self._lock, path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

        return append

    def _copy(self, stream: IO[str], is_stdout: bool, write: Callable[[str], None]) -> None:
        with stream, contextlib.suppress(ValueError):  # ValueError: the interpreter closes its streams at exit
            for raw in stream:
                line = raw.rstrip("\n")
                with self._lock:
                    self._tail.append(line)
                with contextlib.suppress(OSError):  # nowhere to write is no reason to let the child's pipe fill up
                    write(line)
                if is_stdout and line.startswith("ready "):
                    self.addresses = dict(word.split("=", 1) for word in line.split() if "=" in word)
                    self._ready.set()
