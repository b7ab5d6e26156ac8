"""What may go on beside an engine: one connector after the other that loads one item now and then.

Each comes in two forms: in the engine's process, as connectors are, and, to tell what the interpreter lock costs from
what cores and memory cost, in a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.connectors import ec_peer
from benchmarks.connectors.children import Child
from benchmarks.connectors.items import empty_item, expect_same, key_of, random_item
from benchmarks.stalls.sides import Sides
from connectors.conformance.harnesses.redis import RedisHarness
from connectors.ec.base import never
from connectors.ec.store import ECStore, LoadTarget, SaveSource, bytes_of
from connectors.ec.store_connector import ECStoreConnector, StoreOptions
from core.config import ConnectorConfig
from core.types import ECRole

SLOW_S = 0.3
_SLOW_BYTES = 1 << 20


class Stored(NamedTuple):
    """An item that can be loaded: by which connector, and where it is if the key is not enough."""

    connector: ConnectorConfig
    size_bytes: int
    source: str = ""


class Lane:
    """Loads the item when `turn` is called, unless a load of it is under way. `stack` closes it. `is_crowded`: of the
    engine beside it, as its own connector would be told."""

    def __init__(self, stored: Stored, stack: ExitStack, is_crowded: Callable[[], bool] = never) -> None:
        self._sides = Sides(stored.connector, ECRole.CONSUMER, empty_item(stored.size_bytes), is_crowded)
        stack.callback(self._sides.close)
        self._key = key_of(stored.size_bytes)
        if stored.source:
            self._sides.scheduler.add_item_source(self._key, stored.source)
        self._sides.load(self._key)
        expect_same("a load", self._sides.item, random_item(stored.size_bytes))
        self._under_way = False
        self.num_loads = 0

    def turn(self, begins: bool) -> None:
        """What a step does with its connector; `begins`: this one orders a load."""
        if self._under_way and self._sides.poll():
            self._under_way = False
            self.num_loads += 1
        if begins and not self._under_way:
            self._sides.begin_load(self._key)
            self._under_way = True

    def settle(self) -> None:
        """Wait for the load under way."""
        if self._under_way:
            self._sides.wait()
            self._under_way = False
            self.num_loads += 1


class RemoteLane:
    """A Lane whose connector is in a process of its own, and does not know when an engine computes."""

    def __init__(self, stored: Stored, stack: ExitStack) -> None:
        self._child = stack.enter_context(Child(serve))
        self._child.ask(stored)
        self._under_way = False
        self.num_loads = 0

    def turn(self, begins: bool) -> None:
        if self._under_way and self._child.has_answer():
            self.settle()
        if begins and not self._under_way:
            self._child.tell("load")
            self._under_way = True

    def settle(self) -> None:
        if self._under_way:
            self._child.answer()
            self._under_way = False
            self.num_loads += 1


def serve(pipe: Pipe) -> None:
    """The process of a RemoteLane: a lane over the item that it is told first, and a load for each further order."""
    torch.set_num_threads(1)
    with ExitStack() as stack, suppress(EOFError):
        lane = Lane(pipe.recv(), stack)
        pipe.send(None)
        while pipe.recv() is not None:
            lane.turn(True)
            lane.settle()
            pipe.send(None)


# ---- stores, each with its item ----


class SlowConnector(ECStoreConnector):
    """A store that has everything and takes its time."""

    options_type = StoreOptions

    def open_store(self, options: StoreOptions) -> ECStore:
        return _SlowStore()


class _SlowStore(ECStore):
    def __init__(self) -> None:
        self._closing = threading.Event()
        self._item = random_item(_SLOW_BYTES)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return [True] * len(keys)

    def read(self, key: str, target: LoadTarget) -> None:
        self._closing.wait(SLOW_S)
        target.write(bytes_of(self._item))

    def write(self, key: str, source: SaveSource) -> None:
        """It has it already."""

    def close(self) -> None:
        self._closing.set()


def _slow(folder: Path, size_bytes: int, stack: ExitStack) -> Stored:
    return Stored(ConnectorConfig(SlowConnector.__name__, __name__), _SLOW_BYTES)


def _save(connector: ConnectorConfig, size_bytes: int, stack: ExitStack) -> Stored:
    """Who saves stays: an arena in shared memory goes with the last who uses it."""
    sides = Sides(connector, ECRole.PRODUCER, random_item(size_bytes))
    stack.callback(sides.close)
    sides.save(key_of(size_bytes))
    return Stored(connector, size_bytes)


def _shared_storage(folder: Path, size_bytes: int, stack: ExitStack) -> Stored:
    (folder / "items").mkdir()
    extra = {"shared_storage_path": str(folder / "items")}
    return _save(ConnectorConfig("ECSharedStorageConnector", None, extra), size_bytes, stack)


def _shared_memory(folder: Path, size_bytes: int, stack: ExitStack) -> Stored:
    extra = {"path": str(folder / "arena"), "capacity_bytes": 2 * size_bytes}
    return _save(ConnectorConfig("ECSharedMemoryConnector", None, extra), size_bytes, stack)


def _redis(folder: Path, size_bytes: int, stack: ExitStack) -> Stored:
    extra = {"url": stack.enter_context(redis_server(folder))}
    return _save(ConnectorConfig("ECRedisConnector", None, extra), size_bytes, stack)


def _peer(folder: Path, size_bytes: int, stack: ExitStack) -> Stored:
    """The item is in another process's memory."""
    encoder = stack.enter_context(Child(ec_peer.serve))
    return Stored(ConnectorConfig("ECPeerConnector"), size_bytes, encoder.ask(size_bytes))


#: By name. Each is given an empty folder in memory; raises NotTriedError where it cannot be had here.
STORES: dict[str, Callable[[Path, int, ExitStack], Stored]] = {
    "300 ms a load": _slow,
    "shared storage": _shared_storage,
    "Redis": _redis,
    "shared memory": _shared_memory,
    "peer": _peer,
}


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server of its own. Raises NotTriedError where there is none to start."""
    own = folder / "redis"
    own.mkdir()
    server = RedisHarness(own, {})
    try:
        server.open()
        yield server.url()
    finally:
        server.close()
