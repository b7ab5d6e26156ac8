"""The client: one picture and a text, over and over, against the router, the pass-through or the stages themselves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
import psutil

from core.keys import content_hash
from core.server import CHANNEL_OPTIONS
from protos import (
    common_pb2,
    encoder_pb2,
    encoder_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

_CATALOGUE = 10_000
_TEXT = "What is in this picture, and what is it doing there?"


@dataclass(frozen=True)
class Cost:
    """Of one run. `cpu_s` of the process under test alone."""

    num_requests: int
    wall_s: float
    cpu_s: float

    @property
    def per_core(self) -> float:
        """Requests that a whole core of this process would serve in a second."""
        return self.num_requests / self.cpu_s


class Client:
    """One channel. Pictures are so many different files, by some bytes behind their end."""

    def __init__(self, address: str, picture: bytes, max_tokens: int) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._router = router_pb2_grpc.RouterStub(self._channel)
        self._encoder = encoder_pb2_grpc.EncoderStub(self._channel)
        self._prefill = prefill_pb2_grpc.PrefillStub(self._channel)
        self._picture = picture
        self._max_tokens = max_tokens
        self._numbers = count()

    async def close(self) -> None:
        await self._channel.close()

    def _file(self) -> bytes:
        return self._picture + (next(self._numbers) % _CATALOGUE).to_bytes(8, "big")

    def _sampling(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(temperature=0, max_tokens=self._max_tokens, ignore_eos=True)

    async def ask(self) -> float:
        """A whole answer; returns the seconds to its first token."""
        content = [
            common_pb2.ContentPart(image=common_pb2.ImagePart(data=self._file())),
            common_pb2.ContentPart(text=common_pb2.TextPart(text=_TEXT)),
        ]
        message = common_pb2.ChatMessage(role="user", content=content)
        request = router_pb2.GenerateRequest(chat=common_pb2.ChatPrompt(messages=[message]), sampling=self._sampling())
        began_s, first_s, num_tokens = time.perf_counter(), 0.0, 0
        async for response in self._router.Generate(request, timeout=60):
            first_s = first_s or time.perf_counter() - began_s
            num_tokens += len(response.token_ids)
        if num_tokens != self._max_tokens:
            raise RuntimeError(f"{num_tokens} tokens came, not {self._max_tokens}")
        return first_s

    async def ask_stages(self) -> float:
        """As above, of the stages themselves, up to the first token."""
        file = self._file()
        began_s = time.perf_counter()
        encoded = await self._encoder.Encode(
            encoder_pb2.EncodeRequest(image=file, content_hash=content_hash(file)), timeout=60
        )
        chat = common_pb2.ChatPrompt()
        parts = chat.messages.add(role="user").content
        parts.add().image.SetInParent()
        parts.add().text.text = _TEXT
        await self._prefill.Prefill(
            prefill_pb2.PrefillRequest(chat=chat, features=[encoded.feature], sampling=self._sampling()), timeout=60
        )
        return time.perf_counter() - began_s

    async def run(self, num_requests: int, concurrency: int, process: psutil.Process) -> Cost:
        """So many answers, so many at a time."""
        numbers = iter(range(num_requests))

        async def one() -> None:
            for _ in numbers:
                await self.ask()

        before, began_s = _cpu_s(process), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one())
        return Cost(num_requests, time.perf_counter() - began_s, _cpu_s(process) - before)


def _cpu_s(process: psutil.Process) -> float:
    times: Any = process.cpu_times()
    return float(times.user + times.system)
