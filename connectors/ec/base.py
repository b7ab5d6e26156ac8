"""The encoder-cache (EC) connector: how embeddings travel from encoders to the stages that consume them.

One class has two sides, as in vLLM's `ECConnectorBase`, and an engine makes one instance for each: the *scheduler side*
decides what is loaded, the *worker side* moves the bytes. In a single process both exist beside each other and share
nothing but the store. The order of calls:

    start            __init__ of both sides; register_caches and handshake (worker), set_handshake (scheduler)
    a request        add_item_source, ensure_cache_available, has_cache_item until it answers;
                     update_state_after_alloc where it said True; request_finished at its end
    a step           build_connector_meta ▶ bind_connector_metadata ▶ start_load_caches ▶ (forward pass) ▶ save_caches
                     ▶ get_finished ▶ clear_connector_metadata ▶ update_connector_output; item_source for what was saved
    the end          close of both sides, at any moment, also in the middle of loads and saves

    scheduler side (the engine's step thread; must never block, must never do I/O)
        has_cache_item              is this item in the store?  from memory: True, False, or None while looking
        ensure_cache_available      these items will be asked for soon
        add_item_source             where a producer says the item can be had
        item_source                 … and what a producer says of one that it saved
        update_state_after_alloc    room for this item exists in the buffer now: load it
        build_connector_meta        what the worker side is to do this step
        update_connector_output     what the worker side reported
        request_finished            a request ended, however it ended
    worker side (the model runner's thread; starts work and returns)
        register_caches             here is the preallocated device buffer
        handshake                   what the scheduler side must know of the worker side
        bind_connector_metadata     this step's orders
        start_load_caches           begin the loads ordered, on threads of the connector's own
        save_caches                 begin to store one item
        get_finished                what has been stored, loaded, or has failed since the last call
        num_leased, lease_over      how much a drain has to wait for
        clear_connector_metadata    the step is over
    both
        take_counters               what happened that an operator would like to know
        close                       stop threads, free everything; a second call does nothing

Failure is data. A connector raises only `core.errors.ConfigError`, from its constructor, and only for what the operator
wrote: a store that is down at the start is down, not misconfigured. An item that is absent, cut short, corrupt, of
another version or another namespace, and a store that is down, slow or full, all end as a key in `failed_loading` or
`failed_saving` with a reason; the engine has the item made again. It is never a wrong tensor, and never silence: every
order is reported within a time limit that the connector's options set.

Ownership. The buffer slice named in an order belongs to the connector from `start_load_caches` until the key shows up
in `finished_loading` or `failed_loading`; the engine neither reads nor reuses it before, the connector never writes to
it afterwards. The tensor given to `save_caches` may be read by the connector until the key shows up in
`finished_saving` or `failed_saving`; the engine does not write to it before, and what is read of it later must not
become visible to readers. Every key that was ordered or saved is reported exactly once. Two orders for one key are
never under way at once.

What a connector must not do, on any thread, since the engine's step thread is another thread of the same interpreter:

- Keep the interpreter's lock for a millisecond or more: all who are being served wait for it. Sockets, files, copies of
  tensors and arrays, and checksums of large pieces let go of it; slices of a memoryview, `bytes` of a large buffer and
  many a C extension do not, so whatever they are given comes in pieces of a megabyte at most. Python code lets go of it
  every half millisecond (`core/interpreter.py`), and its sum is what the steps beside it lose.
- Wait in any method but `close`; or hold a lock, while it waits for something, that one of its methods takes.
- Call the engine, or change what it was handed. `notify` is the only way back.
- Count on the two sides sharing a process. What goes from one to the other is metadata, `worker_metadata`, `handshake`
  and item sources, and it must survive msgpack: a subclass of ECConnectorMetadata with fields that msgspec can encode,
  no tensor, no callable, no object of the connector's own. Nor on being alone: an engine may have two connectors.
- Change process-wide settings: signal handlers, torch's threads, the current device, the default dtype, the event loop.

A connector over a store that blocks needs none of this by itself: `ECStoreConnector` (store_connector.py) has the
threads, limits and reports, and asks for three methods.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from core.struct import Struct, field
from core.types import ECRole


class ECSide(enum.StrEnum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


class ECItem(Struct, array_like=True, frozen=True):
    """An item as the scheduler knows it before its bytes are there."""

    key: str  # 64 hexadecimal digits; the only name an item has
    num_embeds: int


class BufferSlice(Struct, array_like=True, frozen=True):
    """Rows [start, start + num_rows) of the encoder buffer."""

    start: int
    num_rows: int


class ECLoad(Struct, array_like=True, frozen=True):
    """Order to load one item into one slice."""

    key: str
    where: BufferSlice


class ECConnectorMetadata(Struct, array_like=True):
    """One step's orders from the scheduler side to the worker side. A connector may use a subclass with more."""

    loads: list[ECLoad] = field(default_factory=list)


class ECConnectorOutput(Struct, array_like=True):
    """What the worker side reports after a step. Each key once; the mappings hold a reason fit for a log."""

    finished_saving: list[str] = field(default_factory=list)
    failed_saving: dict[str, str] = field(default_factory=dict)
    finished_loading: list[str] = field(default_factory=list)
    failed_loading: dict[str, str] = field(default_factory=dict)
    bytes_saved: int = 0
    bytes_loaded: int = 0
    seconds_saving: list[float] = field(default_factory=list)  # one value per item in finished_saving
    seconds_loading: list[float] = field(default_factory=list)  # one value per item in finished_loading
    counters: dict[str, int] = field(default_factory=dict)  # the worker side's `take_counters`, filled in by the engine
    worker_metadata: bytes = b""  # a connector's own message to its scheduler side; the engine does not look inside
    num_leased: int = 0  # the worker side's `num_leased`, filled in by the engine

    def __bool__(self) -> bool:
        return bool(
            self.finished_saving
            or self.failed_saving
            or self.finished_loading
            or self.failed_loading
            or self.counters
            or self.worker_metadata
        )


#: What `take_counters` may name. Each is a metric, `triptych:ec_store_<name>_total`.
EC_COUNTERS = (
    "evictions",  # items removed for room or age
    "lookup_failures",  # look-ups that the store did not answer
    "breaker_opens",  # times that the store was left alone because it kept failing
    "tier_failures",  # saves or loads that one tier failed at and another one made good
)
#: Longest `item_source`, in characters. It travels with the request.
MAX_SOURCE_CHARS = 1024


def never() -> bool:
    return False


class ECConnectorConfig(Struct, frozen=True):
    """All that a connector is told. `extra` is the operator's `--ec-connector-extra-config`.

    `notify` may be called from any thread, at any time, at no cost worth counting: it wakes an engine that has nothing
    to run, so that the result of a look-up, load or save is seen at once. A connector that never calls it works, a few
    milliseconds later.

    `is_crowded` may be called likewise: whether a step computes just now with no processor to spare. What works in the
    background does well to rest meanwhile, between pieces of a megabyte or so, as `LoadTarget` has a store do.
    """

    role: ECRole
    namespace: str  # 64 hexadecimal digits; items of another namespace must not be returned
    dtype: torch.dtype
    width: int  # columns of every item
    extra: Mapping[str, Any]
    notify: Callable[[], None]
    is_crowded: Callable[[], bool] = never


class ECConnectorBase(ABC):
    """Base of every EC connector, ours or a stranger's. See the module's docstring for the rules."""

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        self.config = config
        self.side = side
        self._pending_loads: list[ECLoad] = []
        self._metadata: ECConnectorMetadata | None = None

    # ---- scheduler side ----

    @abstractmethod
    def has_cache_item(self, key: str) -> bool | None:
        """Whether the store holds the item: True, False, or None while a look-up that this call began is under way.

        Answers from memory. A True may be out of date by the time of the load, which then fails as data; a False may be
        remembered for a moment, at most until `ensure_cache_available` names the key, and is then looked up again.
        """

    def ensure_cache_available(self, keys: Sequence[str]) -> bool:
        """A request came that will ask for these items: begin whatever brings them near, a look-up at least. Whether
        all of them are known to be there already. Never waits.

        What was found absent before this call is looked up anew, whoever was told so and however short a time ago: the
        request may come because the item was made again, and who misses an item twice gives up.
        """
        answers = [self.has_cache_item(key) for key in keys]
        return all(answers)

    def item_source(self, key: str) -> str:
        """Producer: where a consumer can have an item that was just saved, for connectors whose items are not equally
        near to everybody. At most MAX_SOURCE_CHARS printable characters; "" where the key is enough. The router carries
        it to the consumers; clients never see it and cannot set it."""
        return ""

    def add_item_source(self, key: str, source: str) -> None:  # noqa: B027 - optional hook
        """Consumer: what the producer's `item_source` said. Called before anything else is asked about the key, perhaps
        again with another source after the item was made anew. To be checked: it came over the network."""

    def set_handshake(self, handshake: str) -> None:  # noqa: B027 - optional hook
        """Take the worker side's `handshake()`, once, before the first request."""

    def update_state_after_alloc(self, item: ECItem, where: BufferSlice) -> None:
        """Room was allocated; order the load. Called only after `has_cache_item` returned True."""
        self._pending_loads.append(ECLoad(item.key, where))

    def build_connector_meta(self) -> ECConnectorMetadata:
        """The orders gathered since the last call. Called once a step."""
        loads, self._pending_loads = self._pending_loads, []
        return ECConnectorMetadata(loads=loads)

    def update_connector_output(self, output: ECConnectorOutput) -> None:  # noqa: B027 - optional hook
        """See what the worker side reported; the place to forget a positive look-up whose load failed.

        Producer: a consumer's failure comes in the same way, as `failed_loading` of what was not ordered here. The item
        is then saved again whatever `has_cache_item` says; that save is to make good what the store has of it.
        """

    def request_finished(self, request_id: str) -> None:  # noqa: B027 - optional hook
        """Called once for every end of a request: finished, aborted, failed."""

    # ---- worker side ----

    def register_caches(self, buffer: torch.Tensor) -> None:
        """Take the device buffer, `[num_rows, width]` of `config.dtype`, contiguous, for the life of the connector."""
        self._buffer = buffer

    def handshake(self) -> str:
        """After `register_caches`: what the scheduler side must know, such as an address. The two sides may be in two
        processes, so the engine carries it across."""
        return ""

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        """Take this step's orders."""
        self._metadata = metadata

    @abstractmethod
    def start_load_caches(self) -> None:
        """Begin every load in the bound metadata and return. Never waits for the store."""

    @abstractmethod
    def save_caches(self, key: str, embeds: torch.Tensor) -> None:
        """Begin to store `embeds`, `[num_embeds, width]`, a view of the buffer, under `key`, and return.

        An item becomes visible to readers whole or not at all. Saving an item that is there already succeeds.
        """

    @abstractmethod
    def get_finished(self) -> ECConnectorOutput:
        """Everything that ended since the last call. Never waits."""

    def clear_connector_metadata(self) -> None:
        """Forget this step's orders."""
        self._metadata = None

    def num_leased(self) -> int:
        """Producer, for connectors whose items end with this process: how many are still expected to be pulled from
        here. A drain waits until there are none, or its time is over; so each must end by itself where nobody comes.
        Asked at the end of each step, and a few times a second while there are any: `notify` when the last has gone.
        """
        return 0

    def lease_over(self, key: str) -> None:  # noqa: B027 - optional hook
        """Producer: the item lies in another store as well, which outlives this process: `num_leased` need not count it
        until somebody asks for it here."""

    # ---- both ----

    def take_counters(self) -> Mapping[str, int]:
        """What happened on this side since the last call, by the names in EC_COUNTERS. The side's own thread."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Stop every thread and free everything, within two seconds even if the store hangs. Idempotent."""
