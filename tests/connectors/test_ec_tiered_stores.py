"""ECTieredConnector over real tiers: Redis with the encoder's memory behind it, and a folder before Redis.

The way round a store that is down, full or slow must be taken then, and cost nothing while all is well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.ec.peer import ECPeerConnector
from connectors.ec.peer_memory import ITEM_OVERHEAD_BYTES
from connectors.ec.tiered import ECTieredConnector
from core.types import ECRole
from tests.connectors.redis_server import RedisServer, redis_server
from tests.connectors.support import (
    DEADLINE_S,
    ECSides,
    connector_threads,
    key,
    poll_until,
    random_bits,
    same_bits,
)

Closing = Callable[[ECSides], ECSides]
#: Of Redis in these tests; a load or save over the way round takes a little longer than this.
LIMIT_S = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis(server: RedisServer) -> Iterator[RedisServer]:
    """Empty, and well again afterwards."""
    with server.client() as client:
        client.flushall()
    yield server
    server.stop()
    server.start()


def engine(redis: RedisServer, role: ECRole, **peer: Any) -> ECSides:
    store = {**redis.extra, "timeout_s": LIMIT_S, "breaker_failures": 2, "breaker_cooldown_s": 0.1}
    tiers = [
        {"connector": "ECRedisConnector", "extra": store},
        {"connector": "ECPeerConnector", "extra": {"timeout_s": 2, **peer}, "write": "fallback"},
    ]
    return ECSides(ECTieredConnector, {"tiers": tiers}, role)


@pytest.fixture
def theirs(closing: Closing, redis: RedisServer) -> ECSides:
    return closing(engine(redis, ECRole.PRODUCER))


@pytest.fixture
def ours(closing: Closing, redis: RedisServer) -> ECSides:
    return closing(engine(redis, ECRole.CONSUMER))


def peer_of(side: Any) -> ECPeerConnector:
    peer = side._tiers[1]
    assert isinstance(peer, ECPeerConnector)
    return peer


def num_held(theirs: ECSides) -> int:
    return len(peer_of(theirs.worker)._memory._items)


def counters(*sides: ECSides) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in sides:
        for side in (each.scheduler, each.worker):
            for name, count in side.take_counters().items():
                total[name] = total.get(name, 0) + count
    return {name: count for name, count in total.items() if count}


def hand_over(theirs: ECSides, ours: ECSides, n: int) -> str:
    """As the router does."""
    source = theirs.scheduler.item_source(key(n))
    if source:
        ours.scheduler.add_item_source(key(n), source)
    return source


def has(sides: ECSides, n: int) -> bool:
    """As an engine asks: every few milliseconds, whether it was notified or not."""
    answers: list[bool | None] = []
    poll_until(lambda: answers.append(sides.scheduler.has_cache_item(key(n))) or answers[-1] is not None)
    return answers[-1] is True


def step(sides: ECSides) -> None:
    """What was done in the background is told to the scheduler side."""
    sides.scheduler.update_connector_output(sides.worker.get_finished())


def arrives(theirs: ECSides, ours: ECSides, n: int) -> None:
    """An item is saved, found and loaded."""
    embeds = random_bits(7, 6, torch.float32)
    output = theirs.save(key(n), embeds)
    assert output.finished_saving == [key(n)], output
    assert has(theirs, n)
    hand_over(theirs, ours, n)
    assert has(ours, n)
    assert ours.load(key(n), 0, 7).finished_loading == [key(n)]
    assert same_bits(ours.buffer[:7], embeds)


def test_while_the_store_is_well_the_way_round_costs_nothing(theirs: ECSides, ours: ECSides) -> None:
    for n in range(20):
        arrives(theirs, ours, n)
        assert hand_over(theirs, ours, n) == ""
    assert not has(ours, 99)
    assert num_held(theirs) == 0, "a copy was kept"
    for side in (ours.scheduler, ours.worker):
        client = peer_of(side)._client
        assert client is not None
        assert not list(client._connections)
        assert client._breakers == {}, "the peer was asked"
    assert "ec-tier-copies" not in connector_threads()
    assert counters(theirs, ours) == {}


def test_a_store_that_goes_down_and_comes_back(redis: RedisServer, theirs: ECSides, ours: ECSides) -> None:
    arrives(theirs, ours, 1)
    redis.stop()
    for n in range(2, 8):
        begin_s = time.monotonic()
        arrives(theirs, ours, n)
        assert time.monotonic() - begin_s < DEADLINE_S / 2
        assert hand_over(theirs, ours, n) != ""
    assert num_held(theirs) == 6
    counted = counters(theirs, ours)
    assert counted["tier_failures"] == 6, "six saves went round; the loads did not try the store"
    assert counted["breaker_opens"] > 0
    assert not has(ours, 1), "it is in the store alone"
    redis.start()
    poll_until(lambda: _goes_to_the_store(theirs))
    held = num_held(theirs)
    poll_until(lambda: has(theirs, 1000 + held) and has(ours, 1000 + held))  # both have left it alone for long enough
    for n in range(8, 12):
        arrives(theirs, ours, n)
    assert num_held(theirs) == held
    assert ours.load(key(7), 0, 7).finished_loading == [key(7)], "what the encoder holds stays within reach"


def _goes_to_the_store(theirs: ECSides) -> bool:
    before = num_held(theirs)
    theirs.save(key(1000 + before), random_bits(7, 6, torch.float32))
    return num_held(theirs) == before


def test_an_engine_may_start_while_the_store_is_down(redis: RedisServer, closing: Closing) -> None:
    redis.stop()
    theirs = closing(engine(redis, ECRole.PRODUCER))
    ours = closing(engine(redis, ECRole.CONSUMER))
    arrives(theirs, ours, 1)
    redis.start()


def test_a_store_that_is_full(redis: RedisServer, theirs: ECSides, ours: ECSides) -> None:
    with redis.client() as client:
        client.config_set("maxmemory", "1")
        for n in range(3):
            arrives(theirs, ours, n)
        assert num_held(theirs) == 3
        client.config_set("maxmemory", "0")
    poll_until(lambda: _goes_to_the_store(theirs))


def test_a_store_that_hangs(redis: RedisServer, theirs: ECSides, ours: ECSides) -> None:
    arrives(theirs, ours, 1)
    redis.freeze()
    try:
        begin_s = time.monotonic()
        for n in range(2, 6):
            arrives(theirs, ours, n)
        # Two saves find out that it hangs; the look-ups at the peer do not wait for those at the store.
        assert time.monotonic() - begin_s < 6 * LIMIT_S
        assert num_held(theirs) == 4
    finally:
        redis.thaw()
    poll_until(lambda: _goes_to_the_store(theirs))
    assert has(ours, 5)


def test_a_store_that_lost_what_it_held(redis: RedisServer, theirs: ECSides, ours: ECSides) -> None:
    """The consumer believes its look-up; its load fails as data, and neither tier is to blame."""
    embeds = random_bits(7, 6, torch.float32)
    theirs.save(key(1), embeds)
    assert has(ours, 1)
    with redis.client() as client:
        client.flushall()
    reason = ours.load(key(1), 0, 7).failed_loading[key(1)]
    assert "ECRedisConnector: " in reason
    assert "no peer is known" in reason
    assert not has(ours, 1)


def test_store_down_and_memory_full_is_a_failed_save_that_says_both(
    redis: RedisServer, closing: Closing, ours: ECSides
) -> None:
    theirs = closing(engine(redis, ECRole.PRODUCER, capacity_bytes=4096))
    redis.stop()
    num_bytes = 70 * 6 * 4
    assert 2 * (num_bytes + ITEM_OVERHEAD_BYTES) > 4096
    embeds = random_bits(70, 6, torch.float32)
    assert theirs.save(key(1), embeds).finished_saving == [key(1)]
    reason = theirs.save(key(2), embeds).failed_saving[key(2)]
    assert "ECRedisConnector: " in reason
    assert "capacity_bytes=4096" in reason
    redis.start()


def test_an_encoder_that_dies_takes_with_it_what_it_alone_had(
    redis: RedisServer, theirs: ECSides, ours: ECSides
) -> None:
    redis.stop()
    theirs.save(key(1), random_bits(7, 6, torch.float32))
    assert hand_over(theirs, ours, 1)
    assert has(ours, 1)
    theirs.close()
    assert "could not be made" in ours.load(key(1), 0, 7).failed_loading[key(1)]
    assert not has(ours, 1)
    redis.start()


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_folder_before_redis(closing: Closing, redis: RedisServer, tmp_path: Path, write: str) -> None:
    """Two nodes, each with a folder of its own, and one Redis for both."""

    def node(name: str, role: ECRole) -> ECSides:
        (tmp_path / name).mkdir()
        folder = {"connector": "ECSharedStorageConnector", "extra": {"shared_storage_path": str(tmp_path / name)}}
        tiers = [folder, {"connector": "ECRedisConnector", "extra": redis.extra, "write": write}]
        return closing(ECSides(ECTieredConnector, {"tiers": tiers}, role))

    theirs, ours = node("one", ECRole.PRODUCER), node("two", ECRole.CONSUMER)
    embeds = random_bits(7, 6, torch.float32)
    assert theirs.save(key(1), embeds).finished_saving == [key(1)]
    poll_until(lambda: has(ours, 1))
    assert ours.load(key(1), 0, 7).finished_loading == [key(1)]
    assert same_bits(ours.buffer[:7], embeds)
    poll_until(lambda: step(ours) or _is_settled(ours))
    with redis.client() as client:
        client.flushall()
    assert has(ours, 1)
    assert ours.load(key(1), 8, 7).finished_loading == [key(1)], "it was not promoted"
    assert same_bits(ours.buffer[8:15], embeds)
    assert counters(theirs, ours) == {}


def _is_settled(sides: ECSides) -> bool:
    """Nothing is kept in order to be promoted or written back."""
    return sides.worker._host._used_bytes == 0  # type: ignore[attr-defined, no-any-return]
