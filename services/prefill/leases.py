"""Which engine request a KV handle came from.

A handle is opaque to everyone but its connector, and the router gives a handle back by showing it; or, where the reply
that held the handle never reached it, by naming its request. So the servicer remembers both beside the engine's own id
of the request that it handed over.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from blake3 import blake3

from core.types import KVHandle

#: Handles remembered; beyond it the oldest is forgotten, and its lease then ends by acknowledgement or time alone.
MAX_LEASES = 4096


class Leases:
    """Bounded memory of handles given out. One thread."""

    def __init__(self, max_leases: int = MAX_LEASES) -> None:
        self._max_leases = max_leases
        self._by_handle: OrderedDict[bytes, tuple[str, str]] = OrderedDict()  # digest -> caller's id, engine's id
        self._by_request: defaultdict[str, set[bytes]] = defaultdict(set)

    def remember(self, handle: KVHandle, request_id: str, engine_id: str) -> None:
        """`request_id` is the caller's name for the request, `engine_id` the engine's."""
        digest = _digest(handle)
        self._by_handle[digest] = (request_id, engine_id)
        self._by_request[request_id].add(digest)
        while len(self._by_handle) > self._max_leases:
            self._drop(next(iter(self._by_handle)))

    def forget(self, handle: KVHandle) -> list[str]:
        """The engine's id of the request that the handle came from, once; nothing where it is not remembered."""
        digest = _digest(handle)
        return [self._drop(digest)] if digest in self._by_handle else []

    def forget_request(self, request_id: str) -> list[str]:
        """The engine's ids of everything handed over for a caller's request, once."""
        return [self._drop(digest) for digest in list(self._by_request.get(request_id, ()))]

    def __len__(self) -> int:
        return len(self._by_handle)

    def _drop(self, digest: bytes) -> str:
        request_id, engine_id = self._by_handle.pop(digest)
        digests = self._by_request[request_id]
        digests.discard(digest)
        if not digests:
            del self._by_request[request_id]
        return engine_id


def _digest(handle: KVHandle) -> bytes:
    hasher = blake3(handle.connector.encode())
    hasher.update(b"\0")
    hasher.update(handle.params)
    return hasher.digest()
