"""The EC connector without a store: consumers pull items from the memory of the encoder that made them.

    producer's worker side       keeps what it saved (`peer_memory.py`) and serves it (`peer_server.py`)
    producer's scheduler side    is told with each report what is held; says so in `item_source`, with a token
    consumer's scheduler side    remembers sources and asks the peers (`peer_lookups.py`, `peer_client.py`)
    consumer's worker side       pulls into the encoder buffer (`peer_client.py`, `peer_connection.py`)

Item sources travel with the requests; `ECPeerMetadata` carries them from one side to the other. An item whose producer
is gone, was started again, or does not answer is missing. Nothing is tried on a peer that keeps failing.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import torch
import zmq

from connectors.ec.base import (
    ECConnectorConfig,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECSide,
)
from connectors.ec.job_threads import JobThreads
from connectors.ec.peer_client import PeerClient
from connectors.ec.peer_lookups import PeerLookups
from connectors.ec.peer_memory import ItemMemory
from connectors.ec.peer_orders import Order, Question, Transfer
from connectors.ec.peer_server import ItemServer
from connectors.ec.peer_wire import Digest, Source, new_instance, parse_source, token_of
from connectors.ec.store import LoadTarget, is_digest
from connectors.ec.store_connector import ECStoreConnector, StoreOptions
from connectors.options import EC_EXTRA
from connectors.peer_messages import Token
from connectors.zmq_link import HOST_PATTERN, endpoint_of
from core.errors import ConfigError
from core.struct import field

log = logging.getLogger(__name__)

#: Of the two seconds that `close` has, for the sockets' threads; the chassis takes the rest.
_CLOSE_S = 0.15


class PeerOptions(StoreOptions, frozen=True, kw_only=True):
    """The keys of the extra config."""

    host: Annotated[str, msgspec.Meta(pattern=HOST_PATTERN)] = "127.0.0.1"  # under which consumers reach us
    bind_host: Annotated[str, msgspec.Meta(pattern=HOST_PATTERN)] | None = None  # None: `host`
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0  # 0: any that is free
    capacity_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 1 << 30  # host memory for items
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 60.0  # a fresh item that nobody pulled is kept so long
    lookup_timeout_s: Annotated[float, msgspec.Meta(ge=0.05, le=600)] = 2.0  # a peer that says nothing so long has not


class ECPeerMetadata(ECConnectorMetadata, array_like=True):
    """Besides the loads, where each can be had; and of the items held here, who wants them."""

    sources: dict[str, str] = field(default_factory=dict)  # key -> source
    told: list[str] = field(default_factory=list)  # a consumer was told of these
    own: list[str] = field(default_factory=list)  # … and it is this very engine


class _Handshake(msgspec.Struct, frozen=True):
    """What the producer's scheduler side makes sources of. Stays within the engine: of the secret tokens are made."""

    address: str
    instance: Token
    secret: Digest


class ECPeerConnector(ECStoreConnector):
    """Worker's methods: any one thread at a time."""

    options_type = PeerOptions
    looks_up = False
    options: PeerOptions

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        self._server: ItemServer | None = None
        self._client: PeerClient | None = None
        self._identity: _Handshake | None = None
        self._sources: dict[str, Source] = {}  # worker side: of this step's loads
        self._held: set[str] = set()  # scheduler side: what the worker side says it holds
        self._new: set[str] = set()  # scheduler side: of those, what came since the last step
        self._told: list[str] = []  # scheduler side: for the next step, as `_own`
        self._own: list[str] = []
        super().__init__(config, side)
        options = self.options
        limit_s = options.timeout_s
        if side is ECSide.SCHEDULER:
            limit_s = min(limit_s, options.lookup_timeout_s)
        if config.role.consumes:
            self._client = PeerClient(
                self._context,
                config.namespace,
                limit_s=limit_s,
                breaker_failures=options.breaker_failures,
                breaker_cooldown_s=options.breaker_cooldown_s,
                ended=self._order_ended,
            )
        # As in every connector: one that produces must not believe for long what it is asked about because it vanished.
        positive_ttl_s = options.negative_ttl_s if config.role.produces else float("inf")
        self._peer_lookups = PeerLookups(
            self._put_question,
            positive_ttl_s=positive_ttl_s,
            negative_ttl_s=options.negative_ttl_s,
            timeout_s=limit_s,
        )

    def open_store(self, options: PeerOptions) -> ItemMemory:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        serves = self.side is ECSide.WORKER and self.config.role.produces
        memory = ItemMemory(options.capacity_bytes if serves else 0, options.lease_s, self.config.notify)
        if serves:
            self._server, self._identity = self._serve(options, memory)
        self._memory = memory
        return memory

    def _serve(self, options: PeerOptions, memory: ItemMemory) -> tuple[ItemServer, _Handshake]:
        bind_host = options.bind_host if options.bind_host is not None else options.host
        instance, secret = new_instance(), secrets.token_bytes(32)
        endpoint = endpoint_of(bind_host, options.port)
        try:
            server = ItemServer(self._context, endpoint, self.config.namespace, instance, secret, memory)
        except zmq.ZMQError as error:
            self._context.term()
            key = "host" if options.bind_host is None else "bind_host"
            raise ConfigError(f"{EC_EXTRA} {key}", f"{bind_host}:{options.port}", f"cannot bind: {error}") from None
        return server, _Handshake(endpoint_of(options.host, server.port), instance, secret.hex())

    # ---- scheduler side ----

    def has_cache_item(self, key: str) -> bool | None:
        if key in self._held:
            return True
        return self._peer_lookups.ask(key) if self._client is not None else False

    def ensure_cache_available(self, keys: Sequence[str]) -> bool:
        for key in keys:
            self._peer_lookups.doubt(key)
        return super().ensure_cache_available(keys)

    def item_source(self, key: str) -> str:
        if key in self._held and self._identity is not None:
            if key not in self._new:  # whoever waits for a new one may have it before this is known
                self._told.append(key)
            token = token_of(bytes.fromhex(self._identity.secret), key)
            return str(Source(self._identity.address, self._identity.instance, token))
        source = self._peer_lookups.source_of(key)
        return str(source) if source is not None else ""

    def add_item_source(self, key: str, source: str) -> None:
        parsed = parse_source(source)
        if parsed is None or not is_digest(key):
            log.warning("an item source is not one of a peer: %.100r", source)
        elif self._client is not None:
            self._peer_lookups.add_source(key, parsed)
            if self._identity is not None and parsed.instance == self._identity.instance:
                self._own.append(key)

    def set_handshake(self, handshake: str) -> None:
        if handshake:
            self._identity = msgspec.json.decode(handshake, type=_Handshake)

    def build_connector_meta(self) -> ECPeerMetadata:
        loads = super().build_connector_meta().loads
        found = ((load.key, self._peer_lookups.source_of(load.key)) for load in loads)
        sources = {key: str(source) for key, source in found if source is not None}
        told, own, self._told, self._own = self._told, self._own, [], []
        self._new = set()
        return ECPeerMetadata(loads, sources, told, own)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        for key in output.failed_loading:
            self._peer_lookups.forget(key)
        if output.worker_metadata:
            changes = msgspec.msgpack.decode(output.worker_metadata, type=dict[str, bool])
            for key, is_held in changes.items():
                for keys in (self._held, self._new):
                    (keys.add if is_held else keys.discard)(key)

    def _put_question(self, question: Question) -> None:
        if self._client is not None:
            self._client.order(question)

    # ---- worker side ----

    def handshake(self) -> str:
        return msgspec.json.encode(self._identity).decode() if self._identity is not None else ""

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        self._sources = {}
        if not isinstance(metadata, ECPeerMetadata):
            return
        parsed = ((key, parse_source(source)) for key, source in metadata.sources.items())
        self._sources = {key: source for key, source in parsed if source is not None}
        for key in metadata.told:
            self._memory.told(key)
        for key in metadata.own:
            self._memory.not_awaited(key)

    def save_caches(self, key: str, embeds: torch.Tensor) -> None:
        if self._server is None:
            self._report_save(key, f"this engine is an {self.config.role}: it serves no items")
        else:
            super().save_caches(key, embeds)

    def get_finished(self) -> ECConnectorOutput:
        output = super().get_finished()
        # In this order: what is reported as saved is among the changes.
        changes = self._memory.take_changes()
        if changes:
            output.worker_metadata = msgspec.msgpack.encode(changes)
        return output

    def num_leased(self) -> int:
        return self._memory.num_awaited()

    def lease_over(self, key: str) -> None:
        self._memory.not_awaited(key)

    def _load(self, jobs: JobThreads, key: str, slice_: torch.Tensor, ordered_s: float) -> None:
        source = self._sources.get(key)
        if self._memory.contains([key])[0]:
            super()._load(jobs, key, slice_, ordered_s)
        elif source is None or self._client is None:
            self._report_load(key, "no peer is known to hold the item")
        else:
            deadline_s = ordered_s + self.options.timeout_s

            def make_target() -> LoadTarget:
                return LoadTarget(slice_, self._copies, is_crowded=self.config.is_crowded)

            self._client.order(Transfer(key, source, deadline_s, slice_.nbytes, make_target))

    # ---- both ----

    def _order_ended(self, order: Order) -> None:
        """On the client's thread."""
        if isinstance(order, Transfer):
            seconds = time.monotonic() - order.deadline_s + self.options.timeout_s
            self._report_load(order.key, order.reason, order.num_bytes, seconds)
        elif isinstance(order, Question):
            if order.reason is not None:
                self._lookup_failures += 1
            self._peer_lookups.ended(order)
            self.config.notify()

    def take_counters(self) -> Mapping[str, int]:
        counters = dict(super().take_counters())
        if self._client is not None:
            counters["breaker_opens"] = counters.get("breaker_opens", 0) + self._client.take_opens()
        return counters

    def close(self) -> None:
        if self._closing.is_set():
            return
        parts = [part for part in (self._server, self._client) if part is not None]
        for part in parts:
            part.close(0)
        super().close()
        deadline_s = time.monotonic() + _CLOSE_S
        stopped = [part.close(max(0.0, deadline_s - time.monotonic())) for part in parts]
        # Ending the context waits for every socket, so it must not be tried while a thread still holds one.
        if all(stopped):
            self._context.term()
        else:
            log.warning("a thread of the EC connector did not end in time; its sockets stay until the process ends")
