"""A stage's metrics: names, totals turned into counters, and the HTTP port."""

from __future__ import annotations

import socket
import urllib.request
from dataclasses import dataclass, field

import pytest

from core.errors import ConfigError
from core.metrics import COUNTERS, HISTOGRAMS, StageMetrics
from core.types import Stage
from engine.stats import COUNTERS as ENGINE_COUNTERS

# interface.md fixes these; a dashboard breaks where one is renamed.
FIXED = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "ec_hits_total",
    "ec_misses_total",
    "ec_load_seconds",
    "ec_save_seconds",
    "ec_bytes_total",
    "ec_load_failures_total",
    "ec_evictions_total",
    "kv_transfer_seconds",
    "kv_transfer_bytes_total",
    "stage_queue_seconds",
]


@dataclass
class Stats:
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_held: int = 0
    kv_leases: int = 0
    encoder_cache_bytes_total: int = 0
    encoder_cache_bytes_held: int = 0
    encoder_cache_items: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    observations: dict[str, list[float]] = field(default_factory=dict)
    ec_leases: int = 0


def value(metrics: StageMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value("triptych:" + name, labels)


def test_every_fixed_name_is_shown_from_the_start() -> None:
    metrics = StageMetrics(Stage.PREFILL)
    port = metrics.start_http("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            text = reply.read().decode()
    finally:
        metrics.stop_http()
    for name in FIXED:
        assert f"\ntriptych:{name}" in text
    assert 'triptych:stage_queue_seconds_count{stage="prefill"} 0.0' in text


def test_the_engine_s_counters_are_the_ones_listed_here() -> None:
    assert set(ENGINE_COUNTERS) == set(COUNTERS)


def test_totals_become_increments() -> None:
    metrics = StageMetrics(Stage.DECODE)
    for total in (3, 3, 10):
        metrics.update(Stats(counters={"ec_hits_total": total}))
    assert value(metrics, "ec_hits_total") == 10


def test_gauges_follow_and_usage_is_a_share() -> None:
    metrics = StageMetrics(Stage.DECODE)
    metrics.update(Stats(num_running=2, num_waiting=5, kv_blocks_total=8, kv_blocks_held=2, kv_leases=1, ec_leases=4))
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert value(metrics, "num_requests_running") == 2
    assert value(metrics, "kv_leases") == 1
    assert value(metrics, "ec_leases") == 4
    metrics.update(Stats())
    assert value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "num_requests_running") == 0


def test_observations_reach_their_histograms() -> None:
    metrics = StageMetrics(Stage.DECODE)
    metrics.update(Stats(observations={name: [0.5, 1.5] for name in HISTOGRAMS}))
    for name in HISTOGRAMS:
        labels = {"stage": "decode"} if name == "stage_queue_seconds" else {}
        assert value(metrics, name + "_sum", **labels) == 2.0


def test_a_name_that_is_not_listed_raises_after_the_rest_was_taken() -> None:
    metrics = StageMetrics(Stage.ENCODER)
    stats = Stats(counters={"ec_hits": 1, "ec_misses_total": 2}, observations={"nap_seconds": [1.0]})
    with pytest.raises(KeyError, match="ec_hits, nap_seconds"):
        metrics.update(stats)
    assert value(metrics, "ec_misses_total") == 2


def test_a_port_in_use_names_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--metrics-port={port}: in use"):
            StageMetrics(Stage.ENCODER).start_http("127.0.0.1", port)


def test_stopping_frees_the_port() -> None:
    metrics = StageMetrics(Stage.ENCODER)
    port = metrics.start_http("127.0.0.1", 0)
    metrics.stop_http()
    metrics.stop_http()
    again = StageMetrics(Stage.ENCODER)
    assert again.start_http("127.0.0.1", port) == port
    again.stop_http()
