"""The engine's counters and observations, gathered on the step thread and sent on with the outputs."""

from __future__ import annotations

#: Every counter, so that one that never moved is still reported, as zero. core/metrics.py holds what each means.
COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "ec_hits_total",
    "ec_misses_total",
    "ec_bytes_total",
    "ec_load_failures_total",
    "ec_save_failures_total",
    "ec_evictions_total",
    "ec_store_evictions_total",
    "ec_store_lookup_failures_total",
    "ec_store_breaker_opens_total",
    "ec_store_tier_failures_total",
    "vision_tower_images_total",
    "kv_transfer_bytes_total",
    "kv_transfer_failures_total",
    "kv_transfer_retries_total",
    "kv_transfers_same_host_total",
    "kv_leases_expired_total",
    "kv_recomputations_total",
)

#: Those that stay zero while nothing is broken on purpose: tests and `make cluster-check` hold every worker to it.
FAILURES = (
    "ec_load_failures_total",
    "ec_save_failures_total",
    "ec_store_breaker_opens_total",
    "ec_store_lookup_failures_total",
    "ec_store_tier_failures_total",
    "kv_leases_expired_total",
    "kv_recomputations_total",
    "kv_transfer_failures_total",
    "kv_transfer_retries_total",
    "num_preemptions_total",
)


class StatsCollector:
    """Totals since the start, and the observations since they were last taken. Step thread only."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._observations: dict[str, list[float]] = {}

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def observe(self, name: str, seconds: float) -> None:
        self._observations.setdefault(name, []).append(seconds)

    def take_observations(self) -> dict[str, list[float]]:
        taken, self._observations = self._observations, {}
        return taken
