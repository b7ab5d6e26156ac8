"""The KV connector without a store between: decode engines pull blocks from the prefill engine that holds them.

The scheduler side mints a token for each lease and writes it, with the worker side's address, into the handle. The
worker side has one thread that serves (`server.py`) and one that pulls (`puller.py`); the messages are in `wire.py`.
Where both ends share a host, the bytes do not go through the network: the consumer copies them out of the producer's
memory (`segment.py`). It finds there too where they are and what their checksums are (`board.py`), or asks; leases and
acknowledgements take the same road as ever.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Annotated

import msgspec
import torch

from connectors.kv.base import (
    KVConnectorBase,
    KVConnectorConfig,
    KVConnectorOutput,
    KVLease,
    KVSide,
)
from connectors.kv.leases import LeaseTable
from connectors.kv.puller import Puller
from connectors.kv.rows import BlockRows
from connectors.kv.segment import SameHost, SharedSegment, host_identity, private_memory
from connectors.kv.server import BlockServer
from connectors.kv.transfer import PullEnd
from connectors.kv.wire import (
    MAX_BLOCKS_PER_MESSAGE,
    WIRE_VERSION,
    HandleParams,
    check_layout,
    decode_handle,
    encode,
    new_token,
)
from connectors.options import KV_EXTRA, parse_options
from connectors.zmq_link import HOST_PATTERN, endpoint_of
from core.errors import ConfigError, EngineError
from core.types import KVHandle

log = logging.getLogger(__name__)

#: Of the two seconds that `close` has, for both threads together.
_CLOSE_S = 1.8


class PeerOptions(msgspec.Struct, frozen=True):
    """The keys of the extra config."""

    host: Annotated[str, msgspec.Meta(pattern=HOST_PATTERN)] = "127.0.0.1"  # under which consumers reach us
    bind_host: Annotated[str, msgspec.Meta(pattern=HOST_PATTERN)] | None = None  # None: `host`
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0  # 0: any that is free
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 30.0  # a lease ends if nobody renews it for so long
    max_lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 600.0  # and is not renewed when it is so old
    blocks_per_message: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS_PER_MESSAGE)] = (
        MAX_BLOCKS_PER_MESSAGE  # 2 MiB bound it too
    )
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 10.0  # a peer that is silent so long is gone
    same_host: SameHost = SameHost.AUTO


class KVPeerConnector(KVConnectorBase):
    """Results are guarded by a lock, so the worker's methods may be called from any one thread at a time."""

    def __init__(self, config: KVConnectorConfig, side: KVSide) -> None:
        super().__init__(config, side)
        self._options = self._parse(config)
        if self._options.max_lease_s < self._options.lease_s:
            reason = f"is less than lease_s, {self._options.lease_s:g}"
            raise ConfigError(f"{KV_EXTRA} max_lease_s", self._options.max_lease_s, reason)
        self._lock = threading.Lock()
        self._output = KVConnectorOutput()
        self._table = LeaseTable(self._options.lease_s, self._options.max_lease_s)
        self._segment: SharedSegment | None = None
        self._server: BlockServer | None = None
        self._puller: Puller | None = None
        if side is KVSide.WORKER and config.role.produces:
            self._server = self._bind()

    def _parse(self, config: KVConnectorConfig) -> PeerOptions:
        return parse_options(PeerOptions, config.extra, KV_EXTRA)

    # ---- scheduler side ----

    def get_num_new_matched_tokens(self, handle: KVHandle) -> int:
        params = decode_handle(handle, type(self).__name__)
        check_layout(params.version, self.config.layout, params.layout)
        return params.num_tokens

    def request_finished(self, request_id: str, block_ids: list[int], num_tokens: int) -> KVHandle:
        token = new_token()
        self._leases.append(KVLease(request_id, block_ids, num_tokens, token))
        return self._handle(request_id, len(block_ids), num_tokens, token)

    def make_handle(self, request_id: str, block_ids: list[int], num_tokens: int) -> KVHandle:
        """A handle with a token of its own, which no lease knows: `request_finished` makes those that can be pulled."""
        return self._handle(request_id, len(block_ids), num_tokens, new_token())

    def _handle(self, request_id: str, num_blocks: int, num_tokens: int, token: str) -> KVHandle:
        address, _, segment = self._address.partition(" ")
        if not address:
            raise EngineError("a KV handle was wanted before the handshake with the worker side")
        params = HandleParams(
            version=WIRE_VERSION,
            address=address,
            instance=self.config.instance,
            request_id=request_id,
            token=token,
            layout=self.config.layout,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            lease_s=self._options.lease_s,
            host=host_identity(),
            segment=segment,
        )
        return KVHandle(type(self).__name__, encode(params), num_tokens)

    # ---- worker side ----

    def allocate_kv_cache(self, num_bytes: int, device: torch.device) -> torch.Tensor | None:
        same_host = self._options.same_host
        if same_host is SameHost.NEVER or not self.config.role.produces:
            return private_memory(num_bytes) if device.type == "cpu" else None
        problem = "" if device.type == "cpu" else f"the cache is on {device}"
        if not problem:
            try:
                self._segment = SharedSegment(num_bytes)
                return self._segment.memory
            except OSError as error:
                problem = f"no shared memory can be had: {error}"
        if same_host is SameHost.ALWAYS:
            raise ConfigError("--kv-connector", type(self).__name__, problem)
        log.info("KV blocks go over the network to every consumer: %s", problem)
        return None

    def register_kv_caches(self, blocks: torch.Tensor) -> None:
        if blocks.shape[1:] != (self.config.layout.elements_per_block,):
            raise ValueError(f"a KV cache of {tuple(blocks.shape)} is not of layout {self.config.layout.describe()}")
        if self.side is not KVSide.WORKER:
            raise ValueError("only the worker side takes a KV cache")
        rows = BlockRows(blocks, self.block_mover)
        if self._segment is not None:
            if not self._segment.holds(blocks):
                raise ValueError("the KV cache is not in the memory that was allocated for it")
            self._segment.offer(self.config.instance, rows.num_blocks, rows.row_bytes)
        if self._server is not None:
            self._server.start(rows, self._segment)
        if self.config.role.consumes:
            options = self._options
            self._puller = Puller(
                type(self).__name__,
                self.config.layout,
                rows,
                options.blocks_per_message,
                options.timeout_s,
                options.same_host,
                self._record_pull,
            )

    def handshake(self) -> str:
        """The address, and after a space the name of the shared memory if there is one."""
        if self._server is None:
            return ""
        address = endpoint_of(self._options.host, self._server.port)
        return address if self._segment is None else f"{address} {self._segment.name}"

    def start_load_kv(self) -> None:
        if self._metadata is None:
            return
        metadata, now_s = self._metadata, time.monotonic()
        for lease in metadata.leases:
            self._table.add(lease, now_s)
        # Without a server nobody can pull, and no thread would see the lease expire.
        unserved = [lease.request_id for lease in metadata.leases] if self._server is None else []
        num_released = sum(self._table.release(request_id) for request_id in (*metadata.releases, *unserved))
        if num_released:
            self.config.notify()
        if self._server is not None and metadata.leases:
            self._server.expect(metadata.leases)
        if self._puller is not None:
            self._puller.order(metadata.expected.items(), metadata.pulls, metadata.cancels)
        else:
            for pull in metadata.pulls:
                self._record_pull(PullEnd(pull.request_id, f"this engine is a {self.config.role}, it does not pull"))

    def get_finished(self) -> KVConnectorOutput:
        ended = self._table.take_ended()
        with self._lock:
            output, self._output = self._output, KVConnectorOutput()
        output.finished_sending = ended.finished_sending
        output.expired_sending = ended.expired_sending
        return output

    def _record_pull(self, end: PullEnd) -> None:
        with self._lock:
            output = self._output
            output.bytes_received += end.num_bytes
            if end.given_up:
                output.given_up_recving.append(end.request_id)
            elif end.reason is not None:
                output.failed_recving[end.request_id] = end.reason
                output.num_retries += end.num_retries
            else:
                output.finished_recving.append(end.request_id)
                output.seconds_receiving.append(end.seconds)
                output.roads[end.request_id] = end.road
                output.num_retries += end.num_retries
        self.config.notify()

    def _bind(self) -> BlockServer:
        options = self._options
        host = options.bind_host if options.bind_host is not None else options.host
        try:
            return BlockServer(host, options.port, self.config.layout, self._table, self.config.notify)
        except OSError as error:
            key = "host" if options.bind_host is None else "bind_host"
            raise ConfigError(f"{KV_EXTRA} {key}", f"{host}:{options.port}", f"cannot bind: {error}") from None

    # ---- both ----

    def num_leases(self) -> int:
        return len(self._table)

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        stopped = True
        for part in (self._server, self._puller):
            if part is not None:
                stopped = part.close(max(0.0, deadline - time.monotonic())) and stopped
        if self._segment is not None:
            self._segment.close()
        if stopped:
            self._segment = self._puller = None  # with what they have mapped
        else:
            log.warning("a thread of the KV connector did not end in time; its sockets stay until the process ends")
