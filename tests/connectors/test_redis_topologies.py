"""ECRedisConnector with several servers: hash slots, moves of slots, and masters that die."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis
import torch
from redis.crc import key_slot

from connectors.ec.redis_connector import ECRedisConnector
from core.ports import free_ports
from tests.connectors.redis_server import RedisServer, await_replicas, redis_cluster, redis_sentinel
from tests.connectors.support import ECSides, key, random_bits, same_bits
from tests.connectors.test_redis import SMALL_CHUNKS, assert_no_failures, item_key

Closing = Callable[[ECSides], ECSides]
WIDTH = 8192  # 2 rows are 5 chunks of 15 KiB
VALUES = 5


def sides(url: str, **extra: Any) -> ECSides:
    return ECSides(ECRedisConnector, {"url": url, **SMALL_CHUNKS, **extra}, width=WIDTH)


def cluster_url(nodes: list[RedisServer]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


def soon(condition: Callable[[], bool]) -> None:
    """Within a minute: servers that elect a new master take seconds, and more on a busy machine."""
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s, "nothing happened in time"
        time.sleep(0.02)  # nothing tells of it


def test_a_cluster(closing: Closing) -> None:
    with redis_cluster() as nodes:
        # One of the addresses is out of date.
        pair = closing(
            sides(cluster_url(nodes[:2]) + f",127.0.0.1:{free_ports(1)[0]}", max_bytes=12 * (65536 + 5 * 512))
        )
        embeds = {n: random_bits(2, WIDTH, torch.float32) for n in range(16)}
        for n, embed in embeds.items():
            assert pair.save(key(n), embed).finished_saving == [key(n)]
        found = pair.scheduler._store.contains([key(n) for n in range(20)])
        assert found == [4 <= n < 16 for n in range(20)]
        for n in range(4, 16):
            assert pair.load(key(n), 0, 2).finished_loading == [key(n)]
            assert same_bits(pair.buffer[:2], embeds[n])
        clients = [node.client() for node in nodes]
        sizes = [client.dbsize() for client in clients]
        assert all(sizes)
        assert sum(sizes) == 12 * VALUES + 1
        assert pair.worker.take_counters() == {"lookup_failures": 0, "breaker_opens": 0, "evictions": 4}

        _move_slot(clients, key_slot(item_key(7)))
        for side in (pair.scheduler, pair.worker):
            assert side._store.contains([key(3), key(7), key(8)]) == [False, True, True]
        assert pair.load(key(7), 4, 2).finished_loading == [key(7)]
        assert same_bits(pair.buffer[4:6], embeds[7])
        fresh = closing(sides(cluster_url(nodes[2:])))
        for pool in (fresh, pair):  # a save finds its way too, with what it knew out of date
            _move_slot(clients, key_slot(item_key(100)))
            assert pool.save(key(100), embeds[0]).finished_saving == [key(100)]
            assert pool.load(key(100), 0, 2).finished_loading == [key(100)]
        assert_no_failures(pair)
        for client in clients:
            client.close()
        for each in (pair, fresh):
            each.close()


def test_a_cluster_whose_master_dies(closing: Closing) -> None:
    with redis_cluster(3, 1) as nodes:
        pair = closing(sides(cluster_url(nodes), timeout_s=2, breaker_cooldown_s=0.1))
        embeds = random_bits(2, WIDTH, torch.float32)
        theirs = next(n for n in range(100) if key_slot(item_key(n)) < 16384 // 3)
        ours = next(n for n in range(100) if key_slot(item_key(n)) > 16384 // 3)
        for n in (theirs, ours):
            assert pair.save(key(n), embeds).finished_saving == [key(n)]
        with nodes[0].client() as client:
            await_replicas(client)
        nodes[0].kill()
        soon(lambda: bool(pair.load(key(theirs), 0, 2).finished_loading))
        assert same_bits(pair.buffer[:2], embeds)
        soon(lambda: pair.look_up(key(theirs)) and pair.look_up(key(ours)))
        pair.close()


def test_not_a_cluster(closing: Closing) -> None:
    from tests.connectors.redis_server import redis_server

    with redis_server() as server:
        pair = closing(sides(cluster_url([server])))
        assert "is not one" in pair.save(key(1), random_bits(2, WIDTH, torch.float32)).failed_saving[key(1)]
        pair = closing(sides(f"redis+sentinel://127.0.0.1:{server.port}/mymaster"))
        assert "unknown command" in pair.save(key(1), random_bits(2, WIDTH, torch.float32)).failed_saving[key(1)]


def test_sentinel_finds_the_new_master(closing: Closing) -> None:
    with redis_sentinel("mymaster") as (servers, sentinels):
        url = "redis+sentinel://" + ",".join(f"127.0.0.1:{s.port}" for s in sentinels) + "/mymaster"
        pair = closing(sides(url, timeout_s=2, breaker_cooldown_s=0.1))
        embeds = random_bits(2, WIDTH, torch.float32)
        assert pair.save(key(1), embeds).finished_saving == [key(1)]
        assert pair.look_up(key(1)) is True
        assert_no_failures(pair)
        with servers[0].client() as client:
            await_replicas(client)
            assert client.dbsize() == VALUES

        sentinels[0].kill()
        servers[0].kill()
        soon(lambda: bool(pair.load(key(1), 0, 2).finished_loading))
        assert same_bits(pair.buffer[:2], embeds)
        soon(lambda: bool(pair.save(key(2), embeds).finished_saving))
        with servers[1].client() as client:
            assert client.exists(item_key(2))
        pair.close()


def test_a_service_that_no_sentinel_watches(closing: Closing) -> None:
    with redis_sentinel("mymaster", 1) as (_, sentinels):
        pair = closing(sides(f"redis+sentinel://127.0.0.1:{sentinels[0].port}/other"))
        assert "'other'" in pair.save(key(1), random_bits(2, WIDTH, torch.float32)).failed_saving[key(1)]
        pair.close()


def _move_slot(clients: list[redis.Redis], slot: int) -> None:
    """To the next node, keys and all, as an operator does it."""
    ids = [client.execute_command("CLUSTER MYID").decode() for client in clients]
    source = next(n for n, client in enumerate(clients) if _owns(client, slot))
    target = (source + 1) % len(clients)
    clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
    clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
    for name in clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 1000):
        port = clients[target].connection_pool.connection_kwargs["port"]
        clients[source].migrate("127.0.0.1", port, name, 0, 5000)
    for number in (target, source, 3 - source - target):
        clients[number].execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])


def _owns(client: redis.Redis, slot: int) -> bool:
    try:
        client.get("{" + _tag(slot) + "}")
    except redis.exceptions.MovedError:
        return False
    return True


def _tag(slot: int) -> str:
    return next(str(n) for n in range(1_000_000) if key_slot(str(n).encode()) == slot)
