"""vLLM's scheduler: in vLLM's own interpreter, driven by lines of JSON (see vllm_side.py)."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from benchmarks.scheduler.workload import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    SAMPLED,
    WARM_UP_STEPS,
    Requests,
)

_SIDE = Path(__file__).with_name("vllm_side.py")
#: The first import of vLLM on a machine compiles a thousand files.
_START_S, _ANSWER_S = 180.0, 60.0
_READ_BYTES = 1 << 16
_LOG_TAIL_CHARS = 600


class NoVllmError(Exception):
    """It is not there, or does not work; holds the reason."""


class Vllm:
    """`folder` is one in which vLLM was installed: `venv/bin/python`, and what else must be on its path in `shim` and
    `torchvision`. The constructor waits until vLLM is imported. Raises NoVllmError; a context manager."""

    def __init__(self, folder: Path) -> None:
        python = folder / "venv" / "bin" / "python"
        if not python.is_file():
            raise NoVllmError(f"{folder} has no venv/bin/python")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(folder / name) for name in ("shim", "torchvision")),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "HF_HUB_OFFLINE": "1",
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [python, "-P", _SIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )
        self._received = b""
        try:
            self.version = str(self.ask({}, _START_S)["version"])
        except BaseException:
            self.close()
            raise

    def start(self, requests: Requests) -> VllmStepper:
        """Another scheduler in the same process, with these requests."""
        limits = {
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "sampled": SAMPLED,
            "warm_up_steps": WARM_UP_STEPS,
        }
        return VllmStepper(self, self.ask({"start": {**msgspec.to_builtins(requests), **limits}})["scheduler"])

    def forget(self) -> None:
        """Drop all schedulers so far."""
        self.ask({"forget": True})

    def __enter__(self) -> Vllm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it was not told any more
                    pipe.close()

    def ask(self, question: dict[str, Any], limit_s: float = _ANSWER_S) -> dict[str, Any]:
        """One line there, one back. Raises NoVllmError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NoVllmError(f"vLLM's process ended: {self._last_words()}") from None
        answer: dict[str, Any] = msgspec.json.decode(self._line(time.monotonic() + limit_s))
        return answer

    def _line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise NoVllmError(f"vLLM's process says nothing: {self._last_words()}")
            received = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not received:
                raise NoVllmError(f"vLLM's process ended: {self._last_words()}")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_LOG_TAIL_CHARS:].strip()


class VllmStepper:
    """A Stepper. Raises NoVllmError."""

    def __init__(self, vllm: Vllm, number: int) -> None:
        self._vllm = vllm
        self._number = number

    def steps(self, count: int) -> list[float]:
        return list(self._vllm.ask({"scheduler": self._number, "steps": count})["seconds"])
