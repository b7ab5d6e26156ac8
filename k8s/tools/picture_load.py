"""Questions about pictures, one after the other on a few threads, to whichever router is ready: what clients see."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import grpc
import msgspec

from cli.client import describe, image_request
from core.server import CHANNEL_OPTIONS
from demo.questions import Question, held_out
from protos import common_pb2, router_pb2_grpc

TIMEOUT_S = 60.0
_MAX_TOKENS = 64
#: Few enough that pictures come again, and the store is used.
_NUM_QUESTIONS = 24


class Tally(msgspec.Struct):
    """What came of the requests of one stretch of time."""

    right: int = 0
    wrong: int = 0
    failures: list[str] = msgspec.field(default_factory=list)  # CODE: details
    slowest_s: float = 0.0

    @property
    def total(self) -> int:
        return self.right + self.wrong + len(self.failures)

    def add(self, more: Tally) -> None:
        self.right += more.right
        self.wrong += more.wrong
        self.failures += more.failures
        self.slowest_s = max(self.slowest_s, more.slowest_s)

    def __str__(self) -> str:
        by_code = Counter(failure.partition(":")[0] for failure in self.failures)
        failed = f"{len(self.failures)} failed {dict(by_code) if by_code else ''}".rstrip()
        return f"{self.total} requests, {self.wrong} answered wrongly, {failed}, slowest {self.slowest_s:.1f} s"


class PictureLoad:
    """Threads that ask, inside of `with`, each the next question when its last one is answered.

    `endpoints` says at which addresses a router is ready now. Each request has a connection of its own, as behind a
    Service every client's has, and is not repeated.
    """

    def __init__(self, endpoints: Callable[[], list[str]], port: int, *, seed: int, threads: int = 2) -> None:
        self._endpoints = endpoints
        self._port = port
        self._questions = held_out(seed, _NUM_QUESTIONS)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._tally = Tally()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"load-{i}", daemon=True) for i in range(threads)]

    def __enter__(self) -> PictureLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=TIMEOUT_S + 5)

    def rehearse(self) -> int:
        """Ask everything once, before the threads do, and keep only what the model answers rightly; says how many.

        A wrong answer afterwards is the stack's. Raises grpc.RpcError or LookupError.
        """
        self._questions = [each for each in self._questions if self.ask(each).strip() == each.answer]
        return len(self._questions)

    def take(self) -> Tally:
        """What came of the requests that ended since the last call."""
        with self._lock:
            tally, self._tally = self._tally, Tally()
            return tally

    def ask(self, question: Question) -> str:
        """One answer. Raises grpc.RpcError, or LookupError where no router is ready."""
        endpoints = self._endpoints()
        if not endpoints:
            raise LookupError("no router is ready")
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)
        request = image_request(question.prompt, question.pictures, sampling)
        with grpc.insecure_channel(f"{self._rng.choice(endpoints)}:{self._port}", options=CHANNEL_OPTIONS) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            return "".join(response.text for response in stub.Generate(request, timeout=TIMEOUT_S))

    def _run(self) -> None:
        while not self._stop.is_set():
            question = self._rng.choice(self._questions)
            began = time.monotonic()
            failure, answer = "", ""
            try:
                answer = self.ask(question)
            except LookupError as error:
                failure = f"NO_ENDPOINT: {error}"
                self._stop.wait(0.2)
            except grpc.RpcError as error:
                failure = describe(error)
                self._stop.wait(0.05)
            with self._lock:
                self._tally.slowest_s = max(self._tally.slowest_s, time.monotonic() - began)
                if failure:
                    self._tally.failures.append(failure)
                elif answer.strip() == question.answer:
                    self._tally.right += 1
                else:
                    self._tally.wrong += 1
