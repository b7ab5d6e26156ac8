"""The router's Prometheus metrics, under `triptych:` like those of the stages."""

from __future__ import annotations

import os
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.multiprocess import MultiProcessCollector

from core.metrics import HISTOGRAMS, PREFIX
from core.types import Stage

#: Where processes of one router keep their counts, read by prometheus_client when it is imported.
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: What the label `stage` says: the work, not the worker.
RETRY_LABEL = {Stage.ENCODER: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}
#: Why a stage was called again: its worker could not be reached; had no room; said nothing for long; answered nonsense;
#: an item had left the encoder cache; a stream broke, and prompt and tokens so far were computed elsewhere.
RETRY_REASONS = ("unavailable", "overloaded", "stalled", "broken", "missing", "lost")
#: `router.workers.Worker.state`.
WORKER_STATES = ("serving", "failing", "not serving", "silent", "unreachable", "refused")
#: What a refused request found full: places, room for images, the queue of those that wait for their turn.
REJECT_REASONS = ("inflight", "images", "queue")
#: Counters that stay zero while nothing is broken on purpose, beside `engine.stats.FAILURES`.
FAILURES = ("router_retries_total", "router_breaker_opens_total", "router_dns_failures_total")
#: How requests end. "refused": not one that can be served, or no room for it, here or in a stage.
_OUTCOMES = ("ok", "cancelled", "refused", "error")


class RouterMetrics:
    """All present from the start. Event loop only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.running = Gauge(
            PREFIX + "num_requests_running", "Requests in flight.", multiprocess_mode="livesum", registry=self.registry
        )
        self.retries = Counter(
            PREFIX + "router_retries_total", "Stage calls made again.", ("stage", "reason"), registry=self.registry
        )
        self.requests = Counter(
            PREFIX + "router_requests_total", "Requests that ended.", ("outcome",), registry=self.registry
        )
        self.waiting = Gauge(
            PREFIX + "num_requests_waiting",
            "Requests that wait for their turn.",
            multiprocess_mode="livesum",
            registry=self.registry,
        )
        self.queue_seconds = self._histogram("stage_queue_seconds", stage="router")
        self._rejected = Counter(
            PREFIX + "router_rejected_total", "Requests refused for overload.", ("reason",), registry=self.registry
        )
        self.images_joined = Counter(
            PREFIX + "router_images_joined_total", "Images whose encoding was under way.", registry=self.registry
        )
        self.dns_failures = Counter(
            PREFIX + "router_dns_failures_total", "Names that could not be resolved.", registry=self.registry
        )
        self._workers = Gauge(
            PREFIX + "router_workers",
            "Workers that the router knows.",
            ("stage", "state"),
            multiprocess_mode="livemax",
            registry=self.registry,
        )
        self._breaker_opens = Counter(
            PREFIX + "router_breaker_opens_total",
            "Times that a worker was left alone because its calls failed.",
            ("stage",),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(PREFIX + "prompt_tokens_total", "Prompt tokens.", registry=self.registry)
        self.generation_tokens = Counter(PREFIX + "generation_tokens_total", "Tokens sent.", registry=self.registry)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds")
        self.time_per_output_token = self._histogram("time_per_output_token_seconds")
        self.e2e_latency = self._histogram("e2e_request_latency_seconds")
        for stage in RETRY_LABEL.values():
            for reason in RETRY_REASONS:
                self.retries.labels(stage=stage, reason=reason)
            self._breaker_opens.labels(stage=stage)
            for state in WORKER_STATES:
                self._workers.labels(stage=stage, state=state)
        for reason in REJECT_REASONS:
            self._rejected.labels(reason=reason)
        for outcome in _OUTCOMES:
            self.requests.labels(outcome=outcome)
        ProcessCollector(registry=self.registry)
        #: What /metrics shows: of all processes together, where the router is several (`router.processes`).
        self.exposed = self.registry
        if MULTIPROCESS_VARIABLE in os.environ:
            self.exposed = CollectorRegistry()
            MultiProcessCollector(self.exposed)  # type: ignore[no-untyped-call]

    def _histogram(self, name: str, **labels: str) -> Histogram:
        text, buckets = HISTOGRAMS[name]
        histogram = Histogram(PREFIX + name, text, tuple(labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**labels) if labels else histogram

    def reject(self, reason: str) -> None:
        """A request was refused for overload, for one of `REJECT_REASONS`."""
        self._rejected.labels(reason=reason).inc()

    def count_workers(self, states: Iterable[tuple[Stage, str]]) -> None:
        """Show these workers, each with its stage and one of `WORKER_STATES`, and no others."""
        counts = dict.fromkeys(((stage, state) for stage in RETRY_LABEL for state in WORKER_STATES), 0)
        for each in states:
            counts[each] += 1
        for (stage, state), count in counts.items():
            self._workers.labels(stage=RETRY_LABEL[stage], state=state).set(count)

    def count_breaker_open(self, stage: Stage) -> None:
        self._breaker_opens.labels(stage=RETRY_LABEL[stage]).inc()

    def counters(self) -> dict[str, int]:
        """The totals as GetLoad shows them: each name's sum, and `name{label="value"}` for each series that it has."""
        totals: dict[str, int] = {}
        for family in self.registry.collect():
            if family.type != "counter" or not family.name.startswith(PREFIX):
                continue
            for sample in family.samples:
                if not sample.name.endswith("_total"):
                    continue
                name = sample.name.removeprefix(PREFIX)
                totals[name] = totals.get(name, 0) + int(sample.value)
                if sample.labels:
                    labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                    totals[f"{name}{{{labels}}}"] = int(sample.value)
        return totals
