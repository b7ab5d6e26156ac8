"""A second process for what needs two ends."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Any

_TIMEOUT_S = 60.0


class Child:
    """Runs `serve(pipe)` in a fresh process, from `with` to its end. `serve` returns when it receives None or the pipe
    ends. Raises RuntimeError where the process dies or says nothing for a minute."""

    def __init__(self, serve: Callable[[Pipe], None]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: object) -> Any:
        self.tell(question)
        return self.answer()

    def tell(self, question: object) -> None:
        """`ask` without waiting; `answer` is to follow."""
        self._pipe.send(question)

    def has_answer(self) -> bool:
        """Whether `answer` would not wait."""
        return self._pipe.poll()

    def answer(self) -> Any:
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll(_TIMEOUT_S):
                return self._pipe.recv()
        raise RuntimeError("the other process of the measurement died, or hangs")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(_TIMEOUT_S / 6)
        self._process.kill()
        self._process.join()
        self._pipe.close()
