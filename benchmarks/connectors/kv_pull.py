"""Pulls of KV blocks between two processes: over the network beside bare ZeroMQ, on one host beside a memcpy.

Blocks of 256 KiB, or one block where the size is less, lie scattered in both caches. Bare ZeroMQ sends frames of one
block, as many a message as is best for it, and its consumer copies them to scattered places too. The checksums are
verified on both roads. Leases are made beforehand, and the producer has taken their checksums, as it does while its
answer is on its way through the router; a pull is timed from its order to its report.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection as Pipe

import numpy as np
import torch

from benchmarks.connectors import bare_zmq
from benchmarks.connectors.bare_zmq import BareZMQ, Form
from benchmarks.connectors.children import Child
from benchmarks.connectors.items import empty_item, expect_same, memcpy, random_item
from benchmarks.connectors.measuring import Comparison, Contender, Row, Settings, measure
from benchmarks.kv_transfer import Side
from connectors.kv.base import SAME_HOST
from connectors.kv.transfer import NETWORK
from core.types import KVHandle, KVRole

_BLOCK_BYTES = 256 << 10
_ZMQ_LARGE_BYTES = 8 << 20
_NETWORK_GOAL, _SAME_HOST_GOAL = 0.8, 0.6


def serve(pipe: Pipe) -> None:
    """The producer's process: a new cache for each (block_bytes, num_blocks), a lease for each (name, block ids)."""
    torch.set_num_threads(1)
    side: Side | None = None
    with contextlib.suppress(EOFError):
        while (order := pipe.recv()) is not None:
            first, second = order
            if isinstance(first, int):
                if side is not None:
                    side.close()
                side = Side(KVRole.PRODUCER, first, second, "auto")
                side.blocks.view(-1).copy_(random_item(first * second).view(torch.uint8).view(-1))
                pipe.send(None)
            elif side is not None:
                handle = side.scheduler.request_finished(first, second, len(second))
                side.step()
                side.settle()
                pipe.send(handle)
    if side is not None:
        side.close()


def rows(sizes: Sequence[int], settings: Settings) -> Iterator[Row]:
    with Child(serve) as producer, Child(bare_zmq.serve) as sender, BareZMQ(sender) as bare:
        for size_bytes in sizes:
            yield from _of_size(size_bytes, producer, bare, settings.rounds)


def form_of(block_bytes: int, num_blocks: int) -> Form:
    """The fastest, of messages of one to eight MiB with four or eight in flight, for a pull of this size."""
    is_large = block_bytes * num_blocks > _ZMQ_LARGE_BYTES
    message_bytes, window = (2 << 20, 4) if is_large else (1 << 20, 8)
    return Form(block_bytes, max(1, message_bytes // block_bytes), window)


class _Pulls:
    """A consumer, and the leases that it has not pulled yet."""

    _names = map("pull {}".format, itertools.count())

    def __init__(self, block_bytes: int, num_blocks: int, same_host: str, producer: Child) -> None:
        self.side = Side(KVRole.CONSUMER, block_bytes, num_blocks, same_host)
        self._road = SAME_HOST if same_host == "always" else NETWORK
        self._producer = producer
        self._theirs, self.ours = (random.Random(seed).sample(range(num_blocks), num_blocks) for seed in (1, 2))
        self._leased: list[tuple[str, KVHandle]] = []

    @contextlib.contextmanager
    def leased(self, turns: int) -> Iterator[None]:
        names = list(itertools.islice(self._names, turns))
        self._leased = [(name, self._producer.ask((name, self._theirs))) for name in names]
        yield

    def pull(self) -> None:
        name, handle = self._leased.pop()
        road = self.side.pull(name, handle, self.ours)
        if road != self._road:
            raise RuntimeError(f"a pull took the road {road!r}, not {self._road!r}")

    def check(self) -> None:
        sent = random_item(self.side.blocks.nbytes).view(torch.uint8).view(self.side.blocks.shape)
        with self.leased(1):
            self.pull()
        arrived = self.side.blocks[self.ours]
        expect_same(f"a pull by way of the {self._road}", arrived, sent[self._theirs])

    def contender(self) -> Contender:
        self.check()
        return Contender(self.pull, self.leased)


def _of_size(size_bytes: int, producer: Child, bare: BareZMQ, rounds: int) -> list[Row]:
    block_bytes = min(size_bytes, _BLOCK_BYTES)
    num_blocks = size_bytes // block_bytes
    producer.ask((block_bytes, num_blocks))
    bare.prepare(size_bytes)
    form = form_of(block_bytes, num_blocks)
    network = _Pulls(block_bytes, num_blocks, "never", producer)
    mapped = _Pulls(block_bytes, num_blocks, "always", producer)
    source, target = random_item(size_bytes), empty_item(size_bytes)
    received = np.zeros(size_bytes, dtype=np.uint8)
    bare.receive(received, network.ours, form)
    if not received.all():
        raise RuntimeError("bare ZeroMQ: what arrived is not what was sent")
    try:
        return measure(
            size_bytes,
            {
                "network": network.contender(),
                "bare ZeroMQ": Contender(lambda: bare.receive(received, network.ours, form)),
                "same host": mapped.contender(),
                "memcpy": Contender(memcpy(target, source)),
            },
            [
                Comparison("KV pull, network", "network", "bare ZeroMQ", _NETWORK_GOAL),
                Comparison("KV pull, same host", "same host", "memcpy", _SAME_HOST_GOAL),
            ],
            rounds,
        )
    finally:
        network.side.close()
        mapped.side.close()
