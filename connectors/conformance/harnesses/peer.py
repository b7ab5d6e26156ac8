"""What can be set of `ECPeerConnector`. It has no store that a harness could reach: items are in the producers' memory,
and what befalls those (killed, stopped) the kit tries by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connectors.conformance.harness import Harness


class PeerHarness(Harness):
    """Limits."""

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return {"timeout_s": seconds, "lookup_timeout_s": seconds}

    def capacity(self, num_bytes: int) -> Mapping[str, Any]:
        return {"capacity_bytes": num_bytes, "lease_s": 0}


class KVPeerHarness(Harness):
    """Limits of KV connectors. A lease is what has a time to live there."""

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return {"timeout_s": seconds}

    def ttl(self, seconds: float) -> Mapping[str, Any]:
        return {"lease_s": seconds}
