"""Requests whose answers are known, asked over and over, and what came of them.

A question is a few pictures, a text and sampling parameters. Each time that it is asked its picture files get other
bytes behind their end, which changes no pixel and makes every one an item that was never encoded: the answer stays the
same, token for token, and every stage has work to do.
"""

from __future__ import annotations

import io
import itertools
import random
import threading
import time
from dataclasses import dataclass, field

import grpc
from PIL import Image

from core.server import CHANNEL_OPTIONS
from protos import common_pb2, router_pb2, router_pb2_grpc

#: Longer than anything may take with all faults: who has no answer by then hangs.
TIMEOUT_S = 60.0
_SIDE = 64


@dataclass(frozen=True)
class Answer:
    """All of an answer that must not depend on what happened."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: int
    prompt_tokens: int
    completion_tokens: int
    image_tokens: int


@dataclass(frozen=True)
class Ended:
    """How one request ended: `answer` or `error`."""

    question: int
    began_s: float
    seconds: float
    answer: Answer | None = None
    error: str = ""


@dataclass
class Question:
    """See the head of this file."""

    pictures: list[bytes]
    text: str
    sampling: common_pb2.SamplingParams
    expected: Answer | None = field(default=None)

    def request(self, salt: int) -> router_pb2.GenerateRequest:
        content = [
            common_pb2.ContentPart(image=common_pb2.ImagePart(data=file + salt.to_bytes(8, "big")))
            for file in self.pictures
        ]
        content.append(common_pb2.ContentPart(text=common_pb2.TextPart(text=self.text)))
        message = common_pb2.ChatMessage(role="user", content=content)
        return router_pb2.GenerateRequest(chat=common_pb2.ChatPrompt(messages=[message]), sampling=self.sampling)


def questions(count: int, max_tokens: int) -> list[Question]:
    """As many different ones: with no, one and two pictures, greedy and sampled, some with stop tokens."""
    made = []
    for i in range(count):
        draw = random.Random(i)
        pictures = [_picture(draw) for _ in range((1, 2, 1, 0)[i % 4])]
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        if i % 3 == 1:
            sampling = common_pb2.SamplingParams(
                temperature=1.0, top_p=0.9, seed=i, max_tokens=max_tokens, min_tokens=max_tokens // 2,
                stop_token_ids=[draw.randrange(1000) for _ in range(32)],
            )  # fmt: skip
        made.append(Question(pictures, f"Question {i}: what is there, and what is not?", sampling))
    return made


def _picture(draw: random.Random) -> bytes:
    small = Image.frombytes("RGB", (8, 8), draw.randbytes(192))
    out = io.BytesIO()
    small.resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


class Load:
    """`concurrency` threads that ask, until `stop`. Every request is in `ended` at the end."""

    def __init__(self, router: str, asked: list[Question], concurrency: int) -> None:
        self._channel = grpc.insecure_channel(router, options=CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)
        self._questions = asked
        self._numbers = itertools.count(1)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(concurrency)]
        self.ended: list[Ended] = []

    def learn(self) -> None:
        """Ask each question once, with nothing amiss. Raises grpc.RpcError."""
        for question in self._questions:
            question.expected = self._ask(question)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask no more, and wait for what is under way. Raises TimeoutError where that hangs."""
        self._stopped.set()
        deadline = time.monotonic() + TIMEOUT_S + 10
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError("a request neither ended nor met its deadline")
        self._channel.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            number = next(self._numbers)
            which = number % len(self._questions)
            began_s = time.monotonic()
            answer, error = None, ""
            try:
                answer = self._ask(self._questions[which])
            except grpc.RpcError as failure:
                error = f"{failure.code().name}: {failure.details()}"
            self.ended.append(Ended(which, began_s, time.monotonic() - began_s, answer, error))

    def _ask(self, question: Question) -> Answer:
        request = question.request(random.getrandbits(63))
        token_ids: list[int] = []
        text, finished = "", router_pb2.GenerateFinished()
        for response in self._stub.Generate(request, timeout=TIMEOUT_S):
            token_ids += response.token_ids
            text += response.text
            if response.HasField("finished"):
                finished = response.finished
        usage = finished.usage
        return Answer(
            tuple(token_ids), text, finished.finish_reason, usage.prompt_tokens, usage.completion_tokens,
            usage.image_tokens,
        )  # fmt: skip
