"""KVPeerConnector for one host alone: blocks never go through the network.

For who would rather see a request fail than find out later that a pair of engines was placed on two hosts.
"""

from __future__ import annotations

import msgspec

from connectors.kv.base import KVConnectorConfig
from connectors.kv.peer import KVPeerConnector, PeerOptions
from connectors.kv.segment import SameHost, host_identity
from connectors.kv.wire import decode_handle
from connectors.options import KV_EXTRA, parse_options
from core.errors import ConfigError, IncompatibleError
from core.types import KVHandle


class KVSharedMemoryConnector(KVPeerConnector):
    """As its base, without the option `same_host`. A handle of another host is refused by name; an engine whose cache
    cannot be in shared memory does not start."""

    def _parse(self, config: KVConnectorConfig) -> PeerOptions:
        if "same_host" in config.extra:
            reason = "is not for this connector; KVPeerConnector has it"
            raise ConfigError(f"{KV_EXTRA} same_host", config.extra["same_host"], reason)
        options = parse_options(PeerOptions, config.extra, KV_EXTRA)
        return msgspec.structs.replace(options, same_host=SameHost.ALWAYS)

    def get_num_new_matched_tokens(self, handle: KVHandle) -> int:
        num_tokens = super().get_num_new_matched_tokens(handle)
        theirs, ours = decode_handle(handle, type(self).__name__).host, host_identity()
        if theirs != ours:
            raise IncompatibleError("host of the KV blocks", ours, theirs)
        return num_tokens
