"""The KV connector: how a prompt's key and value blocks travel from a prefill engine to a decode engine.

Split like the EC connector into a scheduler side and a worker side, with vLLM's names. The same rules hold: the
scheduler side never blocks and never does I/O, the worker side starts work on threads of its own and returns, failure
is data, only the constructor and the handshake raise.

    producer (prefill)                                   consumer (decode)
    request_finished    pin the blocks, make a handle    expect_recv                  a request with a handle came
    get_finished        which leases ended               get_num_new_matched_tokens   what does the handle bring?
                                                         update_state_after_alloc     blocks exist now: pull into them
                                                         start_load_kv                begin the pulls ordered
                                                         get_finished                 which pulls ended, and how

A *lease* pins the producer's blocks from `request_finished` until the consumer acknowledges, the router releases the
handle, or the lease's time is over; then the request id shows up in `finished_sending` and the engine frees the blocks.
The consumer's blocks belong to the connector from `start_load_kv` until the request id shows up in `finished_recving`,
`failed_recving` or `given_up_recving`. A request that is aborted meanwhile is cancelled with `cancel_recv`, and still
reported once.

What the EC connector must not do (`connectors/ec/base.py`) this one must not do either: keep the interpreter's lock for
a millisecond or more on any thread, however many blocks a pull has; wait in a method; call the engine by another way
than `notify`; put into metadata, handshake or handles what msgpack cannot carry; change settings of the whole process.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from core.struct import Struct, field
from core.types import KVHandle, KVRole

#: A pull's road, in `KVConnectorOutput.roads`, where the bytes went through memory shared by both engines.
SAME_HOST = "shared memory"


class KVSide(enum.StrEnum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


class KVLayout(Struct, frozen=True):
    """The shape of one KV block, and whose it is. Two engines exchange blocks only where all of it is equal."""

    version: int
    model: str  # digest of the weights
    dtype: str
    num_layers: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int

    @property
    def elements_per_block(self) -> int:
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim

    def describe(self) -> str:
        """One line that holds every field, for errors and for GetServerInfo."""
        return " ".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__)


class KVPull(Struct, array_like=True, frozen=True):
    """Order to pull a request's blocks: remote block i of the handle goes to local block `block_ids[i]`."""

    request_id: str
    handle: KVHandle
    block_ids: list[int]


class KVLease(Struct, array_like=True, frozen=True):
    """Order to serve blocks to whoever holds the handle, until acknowledged, released or expired."""

    request_id: str
    block_ids: list[int]
    num_tokens: int
    token: str = ""  # a connector's own proof that a consumer holds the handle


class KVConnectorMetadata(Struct, array_like=True):
    """One step's orders from the scheduler side to the worker side."""

    pulls: list[KVPull] = field(default_factory=list)
    leases: list[KVLease] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # request ids whose pull is not wanted any more
    releases: list[str] = field(default_factory=list)  # request ids whose lease the router gave up
    expected: dict[str, KVHandle] = field(default_factory=dict)  # pulls that will be ordered when there is room


class KVConnectorOutput(Struct, array_like=True):
    """What the worker side reports after a step. Each request id once per order."""

    finished_sending: list[str] = field(default_factory=list)  # the lease ended; free the blocks
    expired_sending: list[str] = field(
        default_factory=list
    )  # the part of the former that nobody pulled or released in time
    finished_recving: list[str] = field(default_factory=list)
    failed_recving: dict[str, str] = field(default_factory=dict)  # request id -> reason; cancelled pulls too
    bytes_received: int = 0
    seconds_receiving: list[float] = field(default_factory=list)  # one value per request in finished_recving
    given_up_recving: list[str] = field(default_factory=list)  # the router gave the lease up: nobody wants the request
    roads: dict[str, str] = field(default_factory=dict)  # of those in finished_recving, how they came; for people
    num_retries: int = 0  # messages and connections that were lost on the way, and made good

    def __bool__(self) -> bool:
        return bool(self.finished_sending or self.finished_recving or self.failed_recving or self.given_up_recving)


class KVConnectorConfig(Struct, frozen=True):
    """All that a connector is told. `extra` is the operator's `--kv-connector-extra-config`; `notify` as for EC.

    `instance` names this engine's life: the scheduler side writes it and `address` into handles.
    """

    role: KVRole
    layout: KVLayout
    instance: str
    extra: Mapping[str, Any]
    notify: Callable[[], None]


class BlockMover(Protocol):
    """Whole blocks of a cache on a device, `[num_blocks, row]`, and a buffer beside it, `[>= n, row]`, in one launch on
    the calling thread's stream. `block_ids` `[n]` int64, each once, are on the device too. Any thread."""

    @property
    def gather_blocks(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """`(cache, block_ids, staging)`: `staging[i] = cache[block_ids[i]]`."""

    @property
    def scatter_blocks(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """`(staging, block_ids, cache)`: `cache[block_ids[i]] = staging[i]`."""


class KVConnectorBase(ABC):
    """Base of every KV connector. See the module's docstring for the rules."""

    def __init__(self, config: KVConnectorConfig, side: KVSide) -> None:
        self.config = config
        self.side = side
        self._pulls: list[KVPull] = []
        self._leases: list[KVLease] = []
        self._cancels: list[str] = []
        self._releases: list[str] = []
        self._expected: dict[str, KVHandle] = {}
        self._metadata: KVConnectorMetadata | None = None
        self._address = ""
        #: Worker side: the engine sets it before `register_kv_caches`. None where it has no language model.
        self.block_mover: BlockMover | None = None

    # ---- scheduler side ----

    def set_handshake(self, address: str) -> None:
        """Take the worker side's `handshake()`, once, before the first request. The two sides may be in two processes,
        so the engine carries it across."""
        self._address = address

    def expect_recv(self, request_id: str, handle: KVHandle) -> None:
        """A request with a handle came: its pull will be ordered when there is room, or it ends in `cancel_recv`. A
        connector whose leases are short keeps this one alive meanwhile. Not a promise: no report follows."""
        self._expected[request_id] = handle

    def get_num_new_matched_tokens(self, handle: KVHandle) -> int:
        """How many tokens' keys and values the handle brings. Raises IncompatibleError where the layout differs, with
        both values, and InvalidRequestError where the handle is not one of this connector's."""
        return handle.num_tokens

    def update_state_after_alloc(self, request_id: str, handle: KVHandle, block_ids: list[int]) -> None:
        """Local blocks exist; order the pull."""
        self._pulls.append(KVPull(request_id, handle, block_ids))

    @abstractmethod
    def make_handle(self, request_id: str, block_ids: list[int], num_tokens: int) -> KVHandle:
        """A handle by which a consumer on another machine finds these blocks."""

    def request_finished(self, request_id: str, block_ids: list[int], num_tokens: int) -> KVHandle:
        """A prefill ended whose blocks another engine will pull: pin them under a lease and return its handle. The
        engine frees the blocks when the request id shows up in `finished_sending`, not before."""
        self._leases.append(KVLease(request_id, block_ids, num_tokens))
        return self.make_handle(request_id, block_ids, num_tokens)

    def cancel_recv(self, request_id: str) -> None:
        """A request whose pull was ordered is not wanted any more. Reported in `failed_recving` or
        `finished_recving` all the same, and only then may its blocks be reused. Where the pull was only expected,
        nothing is reported. Unknown ids are ignored."""
        self._cancels.append(request_id)

    def release(self, request_id: str) -> None:
        """The router gave a handle up. Unknown ids are ignored."""
        self._releases.append(request_id)

    @property
    def has_orders(self) -> bool:
        """Whether a step is needed to carry orders to the worker side."""
        return bool(self._pulls or self._leases or self._cancels or self._releases or self._expected)

    def build_connector_meta(self) -> KVConnectorMetadata:
        """The orders gathered since the last call. Called once a step."""
        metadata = KVConnectorMetadata(self._pulls, self._leases, self._cancels, self._releases, self._expected)
        self._pulls, self._leases, self._cancels, self._releases, self._expected = [], [], [], [], {}
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:  # noqa: B027 - optional hook
        """See what the worker side reported."""

    # ---- worker side ----

    def allocate_kv_cache(self, num_bytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory for the cache where the connector wants it to be of a kind of its own: `[num_bytes]` uint8 on
        `device`, whose pages take no memory before they are written to. None: the engine allocates it. Called once,
        before `register_kv_caches`; raises ConfigError where the operator asked for what cannot be."""
        return None

    @abstractmethod
    def register_kv_caches(self, blocks: torch.Tensor) -> None:
        """Take the block-major cache, `[num_blocks, elements_per_block]`, contiguous: a row is a block, all layers."""

    def handshake(self) -> str:
        """After `register_kv_caches`: the address that consumers pull from. Empty where nothing is served."""
        return ""

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """Take this step's orders."""
        self._metadata = metadata

    @abstractmethod
    def start_load_kv(self) -> None:
        """Begin the orders of the bound metadata (expected pulls, pulls, leases, cancels, releases) and return."""

    @abstractmethod
    def get_finished(self) -> KVConnectorOutput:
        """Everything that ended since the last call. Never waits."""

    def clear_connector_metadata(self) -> None:
        """Forget this step's orders."""
        self._metadata = None

    # ---- both ----

    @abstractmethod
    def num_leases(self) -> int:
        """Worker side: leases that pin blocks now. Any thread."""

    @abstractmethod
    def close(self) -> None:
        """Stop every thread and socket within two seconds. Idempotent."""
