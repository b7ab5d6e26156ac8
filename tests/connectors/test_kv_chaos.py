"""Pulls from another process through a network that loses, damages and delays: right bytes or a reason."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from core.types import KVHandle, KVRole
from tests.connectors.lossy_proxy import LossyProxy, Mischief, flip_a_bit
from tests.connectors.processes import serve_many_blocks
from tests.connectors.support import DEADLINE_S, KVPair, random_bits, same_bits, with_params
from tests.connectors.support import LAYOUT as SMALL

Closing = Callable[[KVPair], KVPair]

#: 16 KiB a block: a pull of 60 is nearly a megabyte, hundreds of segments on the wire.
LAYOUT = msgspec.structs.replace(SMALL, num_layers=8, head_dim=64)
NUM_BLOCKS = 64
BLOCK_IDS = [(7 * n) % NUM_BLOCKS for n in range(60)]


class Producer:
    """A process that leases the same blocks again and again."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve_many_blocks, args=(theirs, LAYOUT, NUM_BLOCKS, BLOCK_IDS))
        self.process.start()
        torch.manual_seed(0)
        self.blocks = random_bits(NUM_BLOCKS, LAYOUT.elements_per_block, torch.float32)[BLOCK_IDS]

    def lease(self, request_id: str) -> KVHandle:
        self._pipe.send(request_id)
        assert self._pipe.poll(200)
        handle: KVHandle = self._pipe.recv()
        return handle

    def close(self) -> None:
        self._pipe.close()
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == 0


@pytest.fixture(scope="module")
def producer() -> Iterator[Producer]:
    made = Producer()
    yield made
    made.close()


class Chaos:
    """Mischief by the dice: so many chunks in a thousand, on all connections together."""

    def __init__(self, seed: int, *, damage: int = 0, drop: int = 0, cut: int = 0, delay: int = 0) -> None:
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._odds = (damage, drop, cut, delay)
        self.num_damaged = 0
        self._never = threading.Event()

    def __call__(self, data: bytes) -> bytes | None:
        with self._lock:
            throws = [self._dice.randrange(1000) < odds for odds in self._odds]
            damage, drop, cut, delay = throws
            self.num_damaged += damage + drop + cut
            damaged = flip_a_bit(data, self._dice) if damage else data
        if delay:
            self._never.wait(0.02)  # what a slow network does; nothing to wait for
        if cut:
            return None
        return b"" if drop else damaged


@pytest.mark.parametrize(
    ("name", "odds"),
    [
        ("damaged", {"damage": 30}),
        ("cut", {"cut": 25}),
        ("dropped", {"drop": 20}),
        ("delayed", {"delay": 200}),
        ("all", {"damage": 10, "drop": 3, "cut": 8, "delay": 30}),
    ],
)
def test_a_bad_network_never_brings_wrong_blocks(
    closing: Closing, producer: Producer, name: str, odds: dict[str, int]
) -> None:
    timeout_s = 20.0 if name == "delayed" else 2.0  # what is lost is asked for again after half of it
    decode = closing(KVPair(KVRole.CONSUMER, LAYOUT, num_blocks=NUM_BLOCKS, blocks_per_message=2, timeout_s=timeout_s))
    ours = list(range(60))
    arrived, retries, damaged = 0, 0, 0
    for n in range(4):
        handle = producer.lease(f"{name} {n}")
        chaos = Chaos(n, **odds)
        proxy = LossyProxy(_port(handle), chaos)
        try:
            decode.blocks.zero_()
            decode.pull(f"{name} {n}", with_params(handle, {"address": proxy.address, "segment": ""}), ours)
            output = decode.report()
        finally:
            proxy.close()
        retries += output.num_retries
        damaged += chaos.num_damaged
        if output.finished_recving:
            arrived += 1
            assert same_bits(decode.blocks[ours], producer.blocks)
        else:
            assert output.failed_recving[f"{name} {n}"]
    if name == "delayed":
        assert (arrived, retries) == (4, 0), "a network that is only slow cost something"
    else:
        assert damaged, "no chaos at all: the test tests nothing"
        assert retries, "nothing had to be asked for again"
        assert arrived, "no pull ever survived"


@pytest.mark.parametrize("where", [50_000, 400_000, 900_000])
@pytest.mark.parametrize("what", ["cut", "damage"])
def test_one_mishap_is_always_survived(closing: Closing, producer: Producer, where: int, what: str) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, LAYOUT, num_blocks=NUM_BLOCKS, blocks_per_message=4))
    handle = producer.lease(f"{what} {where}")
    proxy = LossyProxy(_port(handle), _once(where, what))
    try:
        decode.pull("d", with_params(handle, {"address": proxy.address, "segment": ""}), list(range(60)))
        output = decode.report()
    finally:
        proxy.close()
    assert output.finished_recving == ["d"], output
    assert 1 <= output.num_retries <= 2
    assert output.bytes_received == 60 * decode.blocks[0].nbytes, "more was pulled again than what was missing"
    assert same_bits(decode.blocks[:60], producer.blocks)


def _once(where: int, what: str) -> Mischief:
    passed = 0

    def mischief(data: bytes) -> bytes | None:
        nonlocal passed
        before, passed = passed, passed + len(data)
        if not before < where <= passed:
            return data
        return None if what == "cut" else flip_a_bit(data, random.Random(where))

    return mischief


def _port(handle: KVHandle) -> int:
    return int(msgspec.msgpack.decode(handle.params)["address"].rpartition(":")[2])


def test_the_segment_of_a_killed_producer_is_gone() -> None:
    """Nothing of it has a name, so there is nothing to sweep."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_many_blocks, args=(theirs, LAYOUT, NUM_BLOCKS, BLOCK_IDS))
    before = set(Path("/dev/shm").glob("*triptych-kv*"))
    process.start()
    ours.send("r")
    assert ours.poll(200)
    segment = msgspec.msgpack.decode(ours.recv().params)["segment"]
    assert segment
    assert f"@triptych-kv-{segment}" in Path("/proc/net/unix").read_text()
    process.kill()
    process.join(DEADLINE_S)
    assert segment not in Path("/proc/net/unix").read_text()
    assert set(Path("/dev/shm").glob("*triptych-kv*")) == before
