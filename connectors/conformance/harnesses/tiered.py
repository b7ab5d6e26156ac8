"""Faults for `ECTieredConnector` over shared storage, with the producer's memory as the way round: the store's faults,
which the way round is to make good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connectors.conformance.harnesses.shared_storage import SharedStorageHarness


class TieredHarness(SharedStorageHarness):
    """The folder's own faults."""

    def extra(self) -> Mapping[str, Any]:
        return {"tiers": self._tiers(super().extra(), {}), **self.operators_extra}

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        each = {"timeout_s": seconds / 2}  # an order's bound is the sum of the tiers'
        return {"tiers": self._tiers({**super().extra(), **each}, {**each, "lookup_timeout_s": seconds / 2})}

    def capacity(self, num_bytes: int) -> Mapping[str, Any]:
        return {"tiers": self._tiers(super().capacity(num_bytes), {"capacity_bytes": num_bytes, "lease_s": 0})}

    def ttl(self, seconds: float) -> Mapping[str, Any]:
        return {"tiers": self._tiers(super().ttl(seconds), {})}

    def _tiers(self, folder: Mapping[str, Any], peer: Mapping[str, Any]) -> list[dict[str, Any]]:
        theirs = {name: value for name, value in folder.items() if name != "tiers"}
        return [
            {"connector": "ECSharedStorageConnector", "extra": theirs},
            {"connector": "ECPeerConnector", "extra": dict(peer), "write": "fallback"},
        ]
