"""What the scheduler tells of its requests: outputs, timelines, latencies."""

from __future__ import annotations

import time

from core.types import Span, Usage
from engine.protocol import EngineCoreOutput, ErrorKind
from engine.request import Ended, Request
from engine.stats import StatsCollector


class RequestOutputs:
    """Gathers outputs until the step's end. Step thread only."""

    def __init__(self, stats: StatsCollector, where: str) -> None:
        self._stats = stats
        self._where = where
        self._ready: list[EngineCoreOutput] = []

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add(self, outputs: list[EngineCoreOutput]) -> None:
        self._ready += outputs

    def take(self) -> list[EngineCoreOutput]:
        """Everything since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def span(self, name: str, start_s: float, note: str = "") -> Span:
        """A stretch of a request's life that ends now."""
        return Span(name, start_s, time.time(), self._where, note)

    def refuse(self, request_id: str, kind: ErrorKind, reason: str, retry_after_s: float | None = None) -> None:
        """End a request that was never taken."""
        self._ready.append(
            EngineCoreOutput(request_id, finished=True, error_kind=kind, error=reason, retry_after_s=retry_after_s)
        )

    def scheduled(self, request: Request) -> None:
        """A request computes something for the first time."""
        request.scheduled_s = time.time()
        self._stats.observe("stage_queue_seconds", request.scheduled_s - request.arrival_s)

    def first_token(self, request: Request) -> None:
        """A request has its first token of this engine."""
        request.first_token_s = time.time()
        if not request.pulled:
            request.spans.append(Span("queue", request.arrival_s, request.scheduled_s, self._where))
            note = f"{request.num_cached_tokens} of {request.num_prompt_tokens} tokens cached"
            request.spans.append(self.span("prefill", request.scheduled_s, note if request.num_cached_tokens else ""))
        if request.num_given_tokens == 0:
            self._stats.observe("time_to_first_token_seconds", request.first_token_s - request.arrival_s)

    def token(self, request: Request, token_id: int) -> None:
        """A token of a request that goes on."""
        self._ready.append(EngineCoreOutput(request.request_id, new_token_ids=[token_id]))

    def last_token(self, request: Request) -> None:
        """A request has made all its tokens."""
        now_s = time.time()
        num_made = len(request.output_token_ids) - request.num_given_tokens
        if num_made > 1:
            self._stats.observe("time_per_output_token_seconds", (now_s - request.first_token_s) / (num_made - 1))
        self._stats.observe("e2e_request_latency_seconds", now_s - request.arrival_s)

    def end(self, request: Request, ended: Ended, new_token_ids: list[int]) -> None:
        """The last output of a request."""
        if request.first_token_s and not request.hand_over:
            request.spans.append(self.span("decode", request.scheduled_s if request.pulled else request.first_token_s))
        self._ready.append(
            EngineCoreOutput(
                request.request_id,
                new_token_ids=new_token_ids,
                finished=True,
                finish_reason=ended.reason,
                kv=ended.kv,
                missing=ended.missing,
                error_kind=ended.error_kind,
                error=ended.error,
                spans=request.spans,
                usage=Usage(
                    prompt_tokens=request.num_prompt_tokens,
                    completion_tokens=len(request.output_token_ids),
                    cached_tokens=min(request.num_cached_tokens, request.num_prompt_tokens)
                    if request.num_given_tokens == 0
                    else 0,
                    image_tokens=request.image_tokens,
                ),
            )
        )
