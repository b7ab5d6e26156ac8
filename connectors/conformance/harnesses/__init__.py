"""Harnesses for the connectors of ours: each brings a store of its own, and faults for it."""

from __future__ import annotations

import importlib

from connectors.conformance.harness import Harness

_HARNESSES = {
    "ECPeerConnector": "peer:PeerHarness",
    "ECRedisConnector": "redis:RedisHarness",
    "ECSharedMemoryConnector": "shared_memory:SharedMemoryHarness",
    "ECSharedStorageConnector": "shared_storage:SharedStorageHarness",
    "ECTieredConnector": "tiered:TieredHarness",
    "KVPeerConnector": "peer:KVPeerHarness",
    "KVSharedMemoryConnector": "peer:KVPeerHarness",
}


def find(connector: str) -> type[Harness] | None:
    """The harness for the connector of that name, if there is one."""
    module, _, name = _HARNESSES.get(connector, "").partition(":")
    if not module:
        return None
    found: type[Harness] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return found
