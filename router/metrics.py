"""The router's Prometheus metrics, under `triptych:` like those of the stages."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from core.metrics import HISTOGRAMS, PREFIX
from core.types import Stage

#: What the label `stage` says: the work, not the worker.
RETRY_LABEL = {Stage.ENCODER: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}
#: Why a stage was called again: its worker could not be reached; an item had left the encoder cache; a stream broke.
RETRY_REASONS = ("unavailable", "missing", "lost")
_OUTCOMES = ("ok", "cancelled", "error")


class RouterMetrics:
    """All present from the start. Event loop only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.running = Gauge(PREFIX + "num_requests_running", "Requests in flight.", registry=self.registry)
        self.retries = Counter(
            PREFIX + "router_retries_total", "Stage calls made again.", ("stage", "reason"), registry=self.registry
        )
        self.requests = Counter(
            PREFIX + "router_requests_total", "Requests that ended.", ("outcome",), registry=self.registry
        )
        self.rejected = Counter(
            PREFIX + "router_rejected_total", "Requests refused for overload.", registry=self.registry
        )
        self.images_joined = Counter(
            PREFIX + "router_images_joined_total", "Images whose encoding was under way.", registry=self.registry
        )
        self.prompt_tokens = Counter(PREFIX + "prompt_tokens_total", "Prompt tokens.", registry=self.registry)
        self.generation_tokens = Counter(PREFIX + "generation_tokens_total", "Tokens sent.", registry=self.registry)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds")
        self.time_per_output_token = self._histogram("time_per_output_token_seconds")
        self.e2e_latency = self._histogram("e2e_request_latency_seconds")
        for stage in RETRY_LABEL.values():
            for reason in RETRY_REASONS:
                self.retries.labels(stage=stage, reason=reason)
        for outcome in _OUTCOMES:
            self.requests.labels(outcome=outcome)
        ProcessCollector(registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        text, buckets = HISTOGRAMS[name]
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

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
