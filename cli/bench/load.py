"""Open-loop load: requests start when they are due, however slow the answers to the earlier ones are."""

from __future__ import annotations

import asyncio
import io
import math
import random
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from PIL import Image

# Short common words: about one token each in most vocabularies.
_WORDS = (  # noqa: SIM905 - a list literal of a hundred words reads worse
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
).split()


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to send."""

    num_requests: int
    request_rate: float = math.inf  # requests a second on average, as a Poisson process; inf: all at once
    images: int = 1  # in each request
    side: int = 448  # pixels
    input_len: int = 32  # words of text
    output_len: int = 64  # tokens, exactly
    repeat_ratio: float = 0.0  # chance that an image is one that was sent before
    seed: int = 0
    timeout_s: float = 120.0  # of each request


class BenchRequest(msgspec.Struct, frozen=True):
    """One request of the load."""

    due_s: float  # after the load's start
    prompt: str
    images: tuple[bytes, ...]  # JPEG files
    output_len: int
    timeout_s: float


class TargetError(Exception):
    """A request failed. `kind` is what the report counts by."""

    def __init__(self, kind: str, details: str) -> None:
        super().__init__(details)
        self.kind = kind


class Record:
    """What happened to one request. Times are seconds since its start."""

    __slots__ = ("_start", "chunk_times_s", "end_s", "error", "error_details", "num_tokens")

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.chunk_times_s: list[float] = []
        self.num_tokens = 0
        self.end_s = 0.0
        self.error = ""  # its kind; empty: none
        self.error_details = ""

    def chunk(self, num_tokens: int) -> None:
        """Tokens arrived just now, together."""
        self.chunk_times_s.append(time.perf_counter() - self._start)
        self.num_tokens += num_tokens

    def end(self) -> None:
        self.end_s = time.perf_counter() - self._start


class Target(Protocol):
    """Something that answers requests. One event loop."""

    async def send(self, request: BenchRequest, record: Record) -> None:
        """Send one request, and call `record.chunk` for whatever arrives. Raises TargetError; may be cancelled."""

    async def close(self) -> None:
        """Once, after the last request."""


def make_image(seed: int, side: int) -> bytes:
    """A JPEG of coloured noise, the same for the same seed."""
    noise = random.Random(seed).randbytes(side * side * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), noise).save(file, format="JPEG", quality=80)
    return file.getvalue()


def make_requests(spec: LoadSpec, on_made: Callable[[], object] = lambda: None) -> list[BenchRequest]:
    """All requests of a load, in order of time; equal specs give equal requests. Calls `on_made` after each.

    They are made beforehand, so that drawing noise does not disturb the times.
    """
    rng = random.Random(spec.seed)
    sent: list[bytes] = []
    requests: list[BenchRequest] = []
    due_s = 0.0
    for _ in range(spec.num_requests):
        images = []
        for _ in range(spec.images):
            if sent and rng.random() < spec.repeat_ratio:
                image = rng.choice(sent)
            else:
                image = make_image(rng.getrandbits(64), spec.side)
                sent.append(image)
            images.append(image)
        prompt = " ".join(rng.choices(_WORDS, k=spec.input_len))
        requests.append(BenchRequest(due_s, prompt, tuple(images), spec.output_len, spec.timeout_s))
        if math.isfinite(spec.request_rate):
            due_s += rng.expovariate(spec.request_rate)
        on_made()
    return requests


async def run_load(
    requests: list[BenchRequest], target: Target, on_done: Callable[[Record], object] = lambda record: None
) -> tuple[list[Record], float]:
    """Send every request when it is due and wait for all. Returns a record each, in order, and the seconds it took.

    A request that fails is a record with an error; nothing is raised for it.
    """
    start = time.perf_counter()

    async def one(request: BenchRequest) -> Record:
        record = Record()
        try:
            async with asyncio.timeout(request.timeout_s):
                await target.send(request, record)
            if not record.chunk_times_s:
                raise TargetError("empty answer", "the answer held no tokens")
        except TargetError as error:
            record.error, record.error_details = error.kind, str(error)
        except TimeoutError:
            record.error, record.error_details = "timeout", f"no end after {request.timeout_s:g} s"
        record.end()
        on_done(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in requests:
            delay_s = request.due_s - (time.perf_counter() - start)
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks], time.perf_counter() - start
