"""Whatever becomes of Redis and of writers, a load or save ends as done or as a reason, in time."""

from __future__ import annotations

import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from connectors.ec.redis_connector import ECRedisConnector
from connectors.ec.store import AbandonedError, SaveSource
from core.ports import free_ports
from core.types import ECRole
from tests.connectors.redis_server import RedisServer, TlsFiles, redis_server
from tests.connectors.support import (
    DEADLINE_S,
    ECSides,
    connector_threads,
    key,
    poll_until,
    random_bits,
    same_bits,
)
from tests.connectors.test_redis import SMALL_CHUNKS

Closing = Callable[[ECSides], ECSides]

WIDTH = 5000  # 5 rows are 7 chunks of 15 KiB
ROWS = 5


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


def sides(server: RedisServer, *, extra: Any = None, width: int = WIDTH, **given: Any) -> ECSides:
    return ECSides(ECRedisConnector, {**server.extra, **SMALL_CHUNKS, **(extra or {})}, width=width, **given)


@pytest.mark.parametrize("checks", range(1, 8))
def test_a_save_past_its_limit_does_not_become_visible(
    server: RedisServer, client: redis.Redis, closing: Closing, checks: int
) -> None:
    """Whenever the limit passes: after so many looks at it."""
    pair = closing(sides(server))
    left = iter([False] * (checks - 1))
    with pytest.raises(AbandonedError):
        pair.worker._store.write(key(1), SaveSource(random_bits(ROWS, WIDTH, torch.float32), lambda: next(left, True)))
    assert client.dbsize() == 0


def test_a_full_redis_fails_saves_and_leaves_nothing_half(
    server: RedisServer, client: redis.Redis, closing: Closing
) -> None:
    pair = closing(sides(server, extra={"breaker_cooldown_s": 0.05}))
    embeds = random_bits(ROWS, WIDTH, torch.float32)
    pair.save(key(1), embeds)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 40_000)
    try:
        reason = pair.save(key(2), embeds).failed_saving[key(2)]
        assert "maxmemory" in reason
        assert client.dbsize() == 7
        assert pair.load(key(1), 0, ROWS).finished_loading == [key(1)]
    finally:
        client.config_set("maxmemory", 0)
    assert pair.save(key(2), embeds).finished_saving == [key(2)]


def test_a_redis_that_evicts_never_yields_a_wrong_item(
    server: RedisServer, client: redis.Redis, closing: Closing
) -> None:
    pair = closing(sides(server))
    embeds = random_bits(ROWS, WIDTH, torch.float32)
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 1_500_000)
    try:
        num_saved = num_loaded = 0
        for n in range(40):
            output = pair.save(key(n), embeds)
            num_saved += len(output.finished_saving)
            # Among keys of one second Redis takes any: now and then a chunk of the item that is being written.
            assert all("evicted parts of the item" in reason for reason in output.failed_saving.values())
        assert num_saved >= 35
        for n in range(40):
            output = pair.load(key(n), 0, ROWS)
            num_loaded += len(output.finished_loading)
            if output.finished_loading:
                assert same_bits(pair.buffer[:ROWS], embeds)
        assert 0 < num_loaded < num_saved
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
    assert pair.worker.take_counters()["breaker_opens"] == 0


def test_a_replica_refuses_saves_by_name(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    pair = closing(sides(server))
    client.replicaof("127.0.0.1", free_ports(1)[0])
    try:
        output = pair.save(key(1), random_bits(ROWS, WIDTH, torch.float32))
    finally:
        client.replicaof("NO", "ONE")
    assert "read-only replica" in output.failed_saving[key(1)]
    assert pair.save(key(1), random_bits(ROWS, WIDTH, torch.float32)).finished_saving == [key(1)]


def test_killed_and_started_again(closing: Closing) -> None:
    with redis_server() as server:
        pair = closing(sides(server, extra={"breaker_cooldown_s": 1.0, "timeout_s": 2}))
        embeds = random_bits(ROWS, WIDTH, torch.float32)
        pair.save(key(1), embeds)
        assert pair.look_up(key(1)) is True
        server.kill()
        assert "Connection refused" in pair.save(key(2), embeds).failed_saving[key(2)]
        pair.load(key(1), 0, ROWS)
        for n in range(3, 8):
            assert pair.look_up(key(n)) is False
        assert pair.scheduler.take_counters()["breaker_opens"] == 1
        assert [pair.scheduler.has_cache_item(key(n)) for n in range(100, 200)] == [False] * 100, "at once"
        server.start()
        poll_until(lambda: bool(pair.save(key(2), embeds).finished_saving))
        poll_until(lambda: pair.look_up(key(2)))
        assert pair.load(key(2), 0, ROWS).finished_loading == [key(2)]
        assert "not in the store" in pair.load(key(1), 0, ROWS).failed_loading[key(1)]


def test_down_at_the_start_is_not_misconfigured(closing: Closing, tmp_path: Path) -> None:
    with redis_server() as server:
        server.kill()
        pair = closing(sides(server, extra={"breaker_cooldown_s": 0.05}))
        assert pair.look_up(key(1)) is False
        server.start()
        poll_until(lambda: bool(pair.save(key(1), random_bits(ROWS, WIDTH, torch.float32)).finished_saving))


def test_a_frozen_redis_holds_nobody_past_the_limit(closing: Closing) -> None:
    limit_s = 1.0
    with redis_server() as server:
        pair = closing(sides(server, extra={"timeout_s": limit_s, "breaker_cooldown_s": 1.0, "breaker_failures": 2}))
        embeds = random_bits(ROWS, WIDTH, torch.float32)
        pair.save(key(1), embeds)
        server.freeze()
        for attempt in (
            lambda: pair.load(key(1), 0, ROWS).failed_loading,
            lambda: pair.save(key(2), embeds).failed_saving,
        ):
            began_s = time.monotonic()
            (reason,) = attempt().values()
            assert time.monotonic() - began_s < DEADLINE_S / 2
            assert "did not answer" in reason
        for n in (3, 4):
            assert pair.look_up(key(n)) is False
        assert pair.worker.take_counters()["breaker_opens"] == 1
        assert pair.scheduler.take_counters()["breaker_opens"] == 1
        assert pair.scheduler.has_cache_item(key(5)) is False
        server.thaw()
        poll_until(lambda: bool(pair.load(key(1), 0, ROWS).finished_loading))
        poll_until(lambda: pair.look_up(key(1)))
        assert pair.look_up(key(2)) is False  # its save was reported as failed, and stays so


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_close_does_not_wait_for_a_frozen_redis(tmp_path: Path, secure: bool) -> None:
    with redis_server(tls=TlsFiles(tmp_path) if secure else None) as server:
        pair = sides(server, extra={"timeout_s": 60})
        embeds = random_bits(ROWS, WIDTH, torch.float32)
        pair.save(key(1), embeds)
        server.freeze()
        assert pair.scheduler.has_cache_item(key(1)) is None
        for n in range(2, 6):  # one on the open connection, one that connects anew, two in the queue
            pair.worker.save_caches(key(n), embeds)
        began_s = time.monotonic()
        pair.close()
        assert time.monotonic() - began_s < DEADLINE_S
        poll_until(lambda: connector_threads() == [])


@pytest.mark.parametrize(
    ("login", "reason"),
    [
        ("ada:wrong-secret@", "refuses user name or password"),
        ("", "wants a password"),
        ("ada:right-secret@", "ACL"),
    ],
    ids=["wrong password", "no password", "no permission"],
)
def test_who_may_not_is_told_why(closing: Closing, login: str, reason: str) -> None:
    with redis_server("user ada on >right-secret ~triptych:* +exists", "user default off") as server:
        pair = closing(ECSides(ECRedisConnector, {"url": f"redis://{login}127.0.0.1:{server.port}"}))
        embeds = random_bits(2, 6, torch.float32)
        told = [*pair.save(key(1), embeds).failed_saving.values(), *pair.load(key(1), 0, 2).failed_loading.values()]
        assert len(told) == 2
        for text in told:
            assert reason in text
            assert "secret" not in text
        assert pair.look_up(key(1)) is False


def test_a_certificate_of_another_authority_is_refused(closing: Closing, tmp_path: Path) -> None:
    tls = TlsFiles(tmp_path)
    with redis_server(tls=tls) as server, redis_server() as plain:
        embeds = random_bits(2, 6, torch.float32)
        for extra, reason in (
            ({"url": server.url, "tls_ca_file": str(tls.other_ca)}, "certificate of Redis is not trusted"),
            ({"url": server.url}, "certificate of Redis is not trusted"),
            ({"url": plain.url.replace("redis:", "rediss:"), "tls_ca_file": str(tls.ca), "timeout_s": 1}, "Redis"),
            ({"url": server.url.replace("rediss:", "redis:")}, "Redis"),
            ({**server.extra, "url": server.url.replace("127.0.0.1", "localhost")}, "certificate"),
        ):
            pair = closing(ECSides(ECRedisConnector, extra))
            assert reason in pair.save(key(1), embeds).failed_saving[key(1)]
            assert pair.look_up(key(1)) is False


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"+OK\r\n" * 3, b"$-7x\r\n"])
def test_something_else_than_redis_listens_there(closing: Closing, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.settimeout(5)
                    if peer.recv(1000):
                        peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        pair = closing(ECSides(ECRedisConnector, {"url": f"redis://127.0.0.1:{port}", "timeout_s": 1}))
        output = pair.save(key(1), random_bits(2, 6, torch.float32))
        assert list(output.failed_saving) == [key(1)]
        assert pair.look_up(key(1)) is False
        pair.close()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def save_for_ever(url: str, first: int, pipe: Connection) -> None:
    """The writer that is killed: saves items `first`, `first` + 1, … whose numbers are in all their bytes."""
    pair = ECSides(ECRedisConnector, {"url": url, **SMALL_CHUNKS}, ECRole.PRODUCER, width=WIDTH)
    for n in range(first, first + 10_000):
        pair.save(key(n), torch.full((20, WIDTH), float(n)))
        if n == first + 2:
            pipe.send("at work")


def test_writers_killed_at_random_moments(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    strangers = {each["id"] for each in client.client_list()}
    context = multiprocessing.get_context("spawn")
    chance = random.Random(5)
    writers = []
    for first in (1000, 20_000):
        ours, theirs = context.Pipe()
        process = context.Process(target=save_for_ever, args=(server.url, first, theirs))
        process.start()
        writers.append((process, ours))
    for process, pipe in writers:
        assert pipe.poll(200)
        time.sleep(chance.random() * 0.02)  # the fault: killed at a random moment
        process.kill()
        process.join()
    # What they had sent is still being read.
    poll_until(lambda: {each["id"] for each in client.client_list()} <= strangers)
    reader = closing(sides(server))
    visible = {int(name[-65:-1], 16) for name in client.keys("*}")}
    assert len(visible) > 6
    for n in visible:
        assert reader.load(key(n), 0, 20).finished_loading == [key(n)]
        assert (reader.buffer[:20] == n).all()
    # What the dead ones left goes away within moments.
    left = [name for name in client.keys("*") if int(name.split(b"}")[0][-64:], 16) not in visible]
    assert all(0 < client.pttl(name) <= 30_000 for name in left)
