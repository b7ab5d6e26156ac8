"""A stage's Prometheus metrics: what the engine reports, under `triptych:`, and the HTTP port that shows it.

The engine counts in its own process and sends totals, gauges and observed values by name; this is where those names are
listed, once. vLLM's names keep vLLM's meanings.
"""

from __future__ import annotations

import threading
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from core.convert import StatsLike
from core.errors import ConfigError
from core.server import check_bindable
from core.types import Stage

PREFIX = "triptych:"

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait, parked ones included.",
    "kv_cache_usage_perc": "Share of the KV blocks that requests and leases hold, 0 to 1.",
    "kv_leases": "Finished prefills whose blocks wait to be pulled.",
    "ec_leases": "Items in this engine's own memory that consumers may still pull.",
    "kv_blocks_held": "KV blocks held by requests and by leases.",
    "encoder_cache_bytes_held": "Bytes of the encoder buffer that are referenced, loading or being saved.",
}

#: Counters that an engine may report in `EngineStats.counters`.
COUNTERS = {
    "prompt_tokens_total": "Prompt tokens computed.",
    "generation_tokens_total": "Tokens generated.",
    "num_preemptions_total": "Requests that lost their KV blocks to others.",
    "prefix_cache_queries_total": "Tokens of prompts that were looked for in the prefix cache.",
    "prefix_cache_hits_total": "Tokens of prompts whose keys and values were found there.",
    "ec_hits_total": "Items found in the encoder cache.",
    "ec_misses_total": "Items not found in the encoder cache.",
    "ec_bytes_total": "Bytes moved to and from the encoder cache.",
    "ec_load_failures_total": "Items whose load from the encoder cache failed.",
    "ec_save_failures_total": "Items whose save to the encoder cache failed.",
    "ec_evictions_total": "Items dropped from the encoder buffer to make room.",
    "ec_store_evictions_total": "Items that a store of the encoder cache removed for room or age.",
    "ec_store_lookup_failures_total": "Look-ups that a store of the encoder cache did not answer.",
    "ec_store_breaker_opens_total": "Times that a store of the encoder cache was left alone because it kept failing.",
    "ec_store_tier_failures_total": "Saves and loads that one tier failed at and another one made good.",
    "vision_tower_images_total": "Images that went through the vision tower.",
    "kv_transfer_bytes_total": "Bytes of KV blocks pulled from other engines.",
    "kv_transfer_failures_total": "Pulls of KV blocks that failed.",
    "kv_transfer_retries_total": "Messages and connections lost or damaged in pulls of KV blocks, and made good.",
    "kv_transfers_same_host_total": "Pulls of KV blocks that went through memory shared by both engines.",
    "kv_leases_expired_total": "Leases that ended because nobody pulled or released in time.",
    "kv_recomputations_total": "Prompts computed again: their KV blocks could not be pulled, or were taken from them.",
}

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

#: Histograms that an engine may report in `EngineStats.observations`: help text and bucket borders in seconds.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _LATENCY_S),
    "time_per_output_token_seconds": ("Between two tokens of a request.", _PER_TOKEN_S),
    "e2e_request_latency_seconds": ("From arrival to the end of the request in this stage.", _LATENCY_S),
    "ec_load_seconds": ("To load one item from the encoder cache.", _TRANSFER_S),
    "ec_save_seconds": ("To save one item to the encoder cache.", _TRANSFER_S),
    "kv_transfer_seconds": ("To pull one request's KV blocks.", _TRANSFER_S),
    "stage_queue_seconds": ("From arrival at the stage until its engine first ran the request.", _LATENCY_S),
}
_LABELLED_BY_STAGE = frozenset({"stage_queue_seconds"})


class EngineStatsLike(StatsLike, Protocol):
    """`engine.protocol.EngineStats`, which core may not import."""

    observations: dict[str, list[float]]
    ec_leases: int


class MetricsHttp:
    """/metrics of one registry on a thread of its own, from construction until `stop`.

    Raises ConfigError, naming `--metrics-port` or `--host`, where it cannot listen there. Port 0 is any free one.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        check_bindable(host, port, port_option="--metrics-port")
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, addr=host.strip("[]"), registry=registry)
        except OSError as error:  # taken by another process since the check
            raise ConfigError("--metrics-port", port, f"in use on {host}") from error
        self.port: int = self._server.server_port

    def stop(self) -> None:
        """Stop listening and end the thread. Once only."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class StageMetrics:
    """The metrics of one stage's engine, all present from the start so that a rate over them has a first value."""

    def __init__(self, stage: Stage) -> None:
        self.registry = CollectorRegistry()
        self._gauges = {name: Gauge(PREFIX + name, text, registry=self.registry) for name, text in _GAUGES.items()}
        self._counters = {name: Counter(PREFIX + name, text, registry=self.registry) for name, text in COUNTERS.items()}
        self._histograms: dict[str, Histogram] = {}
        for name, (text, buckets) in HISTOGRAMS.items():
            labels = ("stage",) if name in _LABELLED_BY_STAGE else ()
            histogram = Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)
            self._histograms[name] = histogram.labels(stage.value) if labels else histogram
        ProcessCollector(registry=self.registry)
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._http: MetricsHttp | None = None

    def update(self, stats: EngineStatsLike) -> None:
        """Take one message of the engine's. One thread only.

        Raises KeyError, after everything else was taken, where the engine used a name that is not listed here.
        """
        values = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": stats.kv_blocks_held / stats.kv_blocks_total if stats.kv_blocks_total else 0.0,
            "kv_leases": stats.kv_leases,
            "ec_leases": stats.ec_leases,
            "kv_blocks_held": stats.kv_blocks_held,
            "encoder_cache_bytes_held": stats.encoder_cache_bytes_held,
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        unknown = []
        for name, total in stats.counters.items():
            if name not in self._counters:
                unknown.append(name)
                continue
            self._counters[name].inc(total - self._totals[name])
            self._totals[name] = total
        for name, observed in stats.observations.items():
            if name not in self._histograms:
                unknown.append(name)
                continue
            for seconds in observed:
                self._histograms[name].observe(seconds)
        if unknown:
            raise KeyError(f"the engine reports metrics that core.metrics does not list: {', '.join(sorted(unknown))}")

    def start_http(self, host: str, port: int) -> int:
        """Show /metrics until `stop_http`; returns the port. Raises ConfigError, see `MetricsHttp`."""
        self._http = MetricsHttp(self.registry, host, port)
        return self._http.port

    def stop_http(self) -> None:
        """Stop showing /metrics. Without effect where it was not shown."""
        if self._http is not None:
            self._http.stop()
            self._http = None
