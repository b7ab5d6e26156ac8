"""The longest hold of the interpreter lock, by each thing that a connector's threads do.

The thread that asks for it sleeps until it is over, so that no Python runs but the connector's and the watch's. Of
several rounds the median counts; the least is what came again each time.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import msgspec
import torch

from benchmarks.connectors import ec_peer, kv_pull
from benchmarks.connectors.children import Child
from benchmarks.connectors.items import empty_item, key_of, random_item
from benchmarks.kv_transfer import Side
from benchmarks.stalls.lanes import redis_server
from benchmarks.stalls.sides import Sides
from connectors.conformance.harness import NotTriedError
from connectors.conformance.lock_watch import LockWatch
from core.config import ConnectorConfig
from core.types import ECRole, KVRole

GOAL_MS = 1.0
NOTHING = "nothing"
_QUIET_S = 0.05
_LOOK_UPS = 64
_BLOCK_BYTES = 64 << 10
_LEASE_S = 1.0


class HoldRow(msgspec.Struct, frozen=True):
    """The longest hold in a round, in milliseconds: median and least of the rounds. `ms_work`: how long it took."""

    what: str
    ms: float
    ms_least: float
    ms_work: float
    rounds: int

    @property
    def reached(self) -> bool | None:
        return None if self.what == NOTHING else self.ms < GOAL_MS


def rows(folder: Path, size_bytes: int, rounds: int, *, with_peers: bool = True) -> Iterator[HoldRow | tuple[str, str]]:
    """A row for each thing; a pair (name, reason) for what cannot be had here. `with_peers`: and those whose other end
    is a process of its own."""
    numbers = itertools.count(1)

    def measured(what: str, work: Callable[[], object]) -> HoldRow:
        work()  # the first time imports, connects and touches pages
        holds, times = [], []
        for _ in range(rounds):
            with LockWatch() as watch:
                begin_s = time.perf_counter()
                work()
                times.append(time.perf_counter() - begin_s)
            holds.append(watch.longest_s)
        return HoldRow(what, 1e3 * statistics.median(holds), 1e3 * min(holds), 1e3 * statistics.median(times), rounds)

    def store(name: str, connector: ConnectorConfig) -> Iterator[HoldRow]:
        sides = Sides(connector, ECRole.BOTH, random_item(size_bytes))
        saved: list[str] = []

        def save() -> None:
            saved[:] = [key_of(next(numbers))]
            source = sides.save(saved[0])
            if source:
                sides.scheduler.add_item_source(saved[0], source)

        try:
            yield measured(f"{name}: save", save)
            yield measured(f"{name}: load", lambda: sides.load(saved[0]))
            yield measured(
                f"{name}: {_LOOK_UPS} look-ups",
                lambda: sides.look_up([key_of(next(numbers)) for _ in range(_LOOK_UPS)]),
            )
        finally:
            sides.close()

    yield measured(NOTHING, lambda: time.sleep(_QUIET_S))
    (folder / "items").mkdir()
    extra = {"shared_storage_path": str(folder / "items"), "capacity_bytes": 4 * size_bytes}
    yield from store("shared storage", ConnectorConfig("ECSharedStorageConnector", None, extra))
    extra = {"path": str(folder / "arena"), "capacity_bytes": 4 * size_bytes}
    yield from store("shared memory", ConnectorConfig("ECSharedMemoryConnector", None, extra))
    try:
        with redis_server(folder) as url:
            yield from store("Redis", ConnectorConfig("ECRedisConnector", None, {"url": url}))
    except NotTriedError as error:
        yield "Redis", str(error)
    if with_peers:
        yield from _peer(measured, size_bytes)
        yield from _kv(measured, size_bytes)


def _peer(measured: Callable[[str, Callable[[], object]], HoldRow], size_bytes: int) -> Iterator[HoldRow]:
    """Each end here, the other one in a process of its own."""
    extra = {"capacity_bytes": 4 * size_bytes, "lease_s": 0.0}
    with ExitStack() as stack:
        encoder = stack.enter_context(Child(ec_peer.serve))
        consumer = Sides(ConnectorConfig("ECPeerConnector"), ECRole.CONSUMER, empty_item(size_bytes))
        stack.callback(consumer.close)
        consumer.scheduler.add_item_source(key_of(size_bytes), encoder.ask(size_bytes))
        yield measured("EC peer: load", lambda: consumer.load(key_of(size_bytes)))
    with ExitStack() as stack:
        puller = stack.enter_context(Child(pull_items))
        producer = Sides(ConnectorConfig("ECPeerConnector", None, extra), ECRole.PRODUCER, random_item(size_bytes))
        stack.callback(producer.close)
        numbers = itertools.count(1)
        yield measured("EC peer: save", lambda: producer.save(key_of(next(numbers))))
        source = producer.save(key_of(0))
        yield measured("EC peer: serve", lambda: puller.ask((size_bytes, key_of(0), source)))


def _kv(measured: Callable[[str, Callable[[], object]], HoldRow], size_bytes: int) -> Iterator[HoldRow]:
    num_blocks = size_bytes // _BLOCK_BYTES
    ids = random.Random(0).sample(range(num_blocks), num_blocks)
    for same_host, road in (("never", "network"), ("always", "same host")):
        names = map(f"{road} {{}}".format, itertools.count())
        with ExitStack() as stack:
            theirs = stack.enter_context(Child(kv_pull.serve))
            consumer = Side(KVRole.CONSUMER, _BLOCK_BYTES, num_blocks, same_host)
            stack.callback(consumer.close)
            theirs.ask((_BLOCK_BYTES, num_blocks))

            def pull(side: Side = consumer, names: Iterator[str] = names, theirs: Child = theirs) -> None:
                name = next(names)
                side.pull(name, theirs.ask((name, ids)), ids)

            yield measured(f"KV peer: pull, {road}", pull)
        with ExitStack() as stack:
            theirs = stack.enter_context(Child(pull_blocks))
            producer = Side(KVRole.PRODUCER, _BLOCK_BYTES, num_blocks, "auto")
            stack.callback(producer.close)
            theirs.ask((_BLOCK_BYTES, num_blocks, same_host))

            def send(side: Side = producer, names: Iterator[str] = names, theirs: Child = theirs) -> None:
                name = next(names)
                handle = side.scheduler.request_finished(name, ids, num_blocks)
                side.step()
                theirs.ask((name, handle, ids))

            yield measured(f"KV peer: send, {road}", send)


def pull_items(pipe: Pipe) -> None:
    """A consumer's process: loads the item of `(size_bytes, key, source)` and answers."""
    torch.set_num_threads(1)
    sides: Sides | None = None
    with suppress(EOFError):
        while (order := pipe.recv()) is not None:
            size_bytes, key, source = order
            if sides is None:
                sides = Sides(ConnectorConfig("ECPeerConnector"), ECRole.CONSUMER, empty_item(size_bytes))
            sides.scheduler.add_item_source(key, source)
            sides.load(key)
            pipe.send(None)
    if sides is not None:
        sides.close()


def pull_blocks(pipe: Pipe) -> None:
    """A consumer's process: a cache for the first order, (block_bytes, num_blocks, same_host), and then a pull for each
    (name, handle, block ids)."""
    torch.set_num_threads(1)
    with suppress(EOFError):
        side = Side(KVRole.CONSUMER, *pipe.recv())
        pipe.send(None)
        while (order := pipe.recv()) is not None:
            side.pull(*order)
            pipe.send(None)
        side.close()
