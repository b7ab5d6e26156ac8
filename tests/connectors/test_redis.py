"""ECRedisConnector over a healthy server: what was saved comes back, whole, for as long as it should, and no longer."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import torch

from connectors.ec.redis_connector import ECRedisConnector
from connectors.ec.store import SaveSource
from core.types import ECRole
from tests.connectors.redis_server import RedisServer, TlsFiles, redis_server
from tests.connectors.support import NAMESPACE, ECSides, key, poll_until, random_bits, same_bits

Closing = Callable[[ECSides], ECSides]
SMALL_CHUNKS = {"chunk_bytes": 16 << 10}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.client() as client:
        client.flushall()
        client.config_resetstat()
    return shared_server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


def sides(server: RedisServer, role: ECRole = ECRole.BOTH, *, extra: Any = None, **given: Any) -> ECSides:
    return ECSides(ECRedisConnector, {**server.extra, **(extra or {})}, role, **given)


def item_key(n: int) -> bytes:
    """The Redis key of an item, which is part of the format."""
    return f"triptych:1:{{{NAMESPACE[:16]}:{key(n)}}}".encode()


def assert_no_failures(pair: ECSides) -> None:
    for side in (pair.scheduler, pair.worker):
        assert not any(side.take_counters().values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (3, 5462), (257, 300)])
def test_bits_come_back(server: RedisServer, closing: Closing, dtype: torch.dtype, rows: int, width: int) -> None:
    producer = closing(sides(server, ECRole.PRODUCER, extra=SMALL_CHUNKS, dtype=dtype, width=width, num_rows=rows))
    consumer = closing(sides(server, ECRole.CONSUMER, dtype=dtype, width=width, num_rows=rows + 2))
    embeds = random_bits(rows, width, dtype)
    assert producer.look_up(key(1)) is False
    saved = producer.save(key(1), embeds)
    assert saved.finished_saving == [key(1)]
    assert saved.bytes_saved == embeds.nbytes
    assert consumer.look_up(key(1)) is True
    loaded = consumer.load(key(1), 1, rows)
    assert loaded.finished_loading == [key(1)]
    assert loaded.bytes_loaded == embeds.nbytes
    assert same_bits(consumer.buffer[1 : rows + 1], embeds)
    assert not consumer.buffer[0].view(torch.uint8).any()
    assert not consumer.buffer[-1].view(torch.uint8).any()
    assert_no_failures(producer)
    assert_no_failures(consumer)


@pytest.mark.parametrize("num_bytes", [15 * 1024 - 1, 15 * 1024, 15 * 1024 + 1, 45 * 1024, 20 << 20])
def test_sizes_at_the_edges_of_chunks(
    server: RedisServer, client: redis.Redis, closing: Closing, num_bytes: int
) -> None:
    given = {"dtype": torch.float8_e5m2, "width": 1, "num_rows": num_bytes}
    pair = closing(sides(server, extra=SMALL_CHUNKS, **given))
    embeds = random_bits(num_bytes, 1, torch.float8_e5m2)
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert client.dbsize() == -(-num_bytes // (15 * 1024))
    assert max(client.strlen(name) for name in client.keys("*")[:100]) <= 16 * 1024
    assert pair.load(key(1), 0, num_bytes).finished_loading == [key(1)]
    assert same_bits(pair.buffer, embeds)
    assert_no_failures(pair)


def test_a_quarter_of_a_gigabyte(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    pair = closing(sides(server, width=1 << 16, num_rows=1024, extra={"timeout_s": 60}))
    embeds = torch.arange(1 << 26, dtype=torch.int32).view(torch.float32).view(1024, 1 << 16)
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert pair.load(key(1), 0, 1024).finished_loading == [key(1)]
    assert torch.equal(pair.buffer.view(torch.uint8), embeds.view(torch.uint8))
    client.flushall()


def test_a_power_of_two_is_stored_without_waste(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    """The allocator's next size after 512 KiB is 640: a chunk with its head must fit the former."""
    pair = closing(sides(server, width=1 << 18, num_rows=8))
    pair.save(key(1), random_bits(8, 1 << 18, torch.float32))
    used = sum(client.memory_usage(name) for name in client.keys("*"))
    assert used < 1.02 * (8 << 20)


def test_namespaces_do_not_see_each_other(server: RedisServer, closing: Closing) -> None:
    ours, theirs = closing(sides(server)), closing(sides(server, namespace="f" * 64))
    ours.save(key(1), random_bits(2, 6, torch.float32))
    assert theirs.look_up(key(1)) is False
    assert "not in the store" in theirs.load(key(1), 0, 2).failed_loading[key(1)]
    assert ours.look_up(key(1)) is True


def test_saving_what_is_there_changes_nothing(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    pair = closing(sides(server, extra=SMALL_CHUNKS, width=8192))
    embeds = random_bits(4, 8192, torch.float32)
    pair.save(key(1), embeds)
    before = {name: client.get(name) for name in client.keys("*")}
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert {name: client.get(name) for name in client.keys("*")} == before


def test_look_ups_are_one_command_each_in_few_trips(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    pair = closing(sides(server))
    pair.save(key(7), random_bits(2, 6, torch.float32))
    client.config_resetstat()
    keys = [key(n) for n in range(2000)]
    assert pair.scheduler._store.contains(keys) == [n == 7 for n in range(2000)]
    commands = client.info("commandstats")
    assert commands["cmdstat_exists"]["calls"] == 2000
    assert not {"cmdstat_scan", "cmdstat_keys"} & set(commands)
    assert client.info("stats")["total_reads_processed"] < 60


def test_an_item_expires_unless_it_is_loaded(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    pair = closing(sides(server, extra={**SMALL_CHUNKS, "ttl_s": 100}, width=8192))
    for n in (1, 2):
        pair.save(key(n), random_bits(2, 8192, torch.float32))
    names = [name for name in client.keys("*") if name.startswith(item_key(1))]
    assert len(names) == 5
    for name in client.keys("*"):  # as if half of the time had passed
        client.pexpire(name, client.pttl(name) - 50_000)
    pair.look_up(key(2))
    pair.load(key(1), 0, 2)
    assert 95_000 < client.pttl(item_key(1)) <= 100_000
    assert all(client.pttl(name) > 155_000 for name in names if name != item_key(1))  # a minute longer
    assert client.pttl(item_key(2)) <= 50_000
    client.pexpire(item_key(2), 1)
    poll_until(lambda: not client.exists(item_key(2)))
    pair.scheduler.update_connector_output(pair.load(key(2), 0, 2))
    assert pair.look_up(key(2)) is False


def test_nothing_is_kept_for_ever(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    pair = closing(sides(server, extra={**SMALL_CHUNKS, "max_bytes": 1 << 20}, width=8192))
    pair.save(key(1), random_bits(2, 8192, torch.float32))
    pair.load(key(1), 0, 2)
    assert all(client.pttl(name) > 0 for name in client.keys("*"))


def test_the_byte_cap_removes_the_least_recently_used(
    server: RedisServer, client: redis.Redis, closing: Closing
) -> None:
    size = 2 * 8192 * 4
    pair = closing(sides(server, extra={**SMALL_CHUNKS, "max_bytes": 4 * (size + 5 * 512)}, width=8192))
    embeds = {n: random_bits(2, 8192, torch.float32) for n in range(1, 8)}
    for n in range(1, 5):
        assert pair.save(key(n), embeds[n]).finished_saving == [key(n)]
    assert pair.worker.take_counters()["evictions"] == 0
    pair.load(key(1), 0, 2)  # now 2 is the oldest
    for n in (5, 6):
        assert pair.save(key(n), embeds[n]).finished_saving == [key(n)]
    assert pair.worker.take_counters()["evictions"] == 2
    there = [n for n in range(1, 7) if client.exists(item_key(n))]
    assert there == [1, 4, 5, 6]
    assert client.dbsize() == 4 * 5 + 1  # chunks went with their items; one index
    for n in there:
        assert pair.load(key(n), 4, 2).finished_loading == [key(n)]
        assert same_bits(pair.buffer[4:6], embeds[n])


def test_an_item_larger_than_the_cap_is_refused_and_evicts_nothing(
    server: RedisServer, client: redis.Redis, closing: Closing
) -> None:
    pair = closing(sides(server, extra={"max_bytes": 100_000}, width=8192))
    pair.save(key(1), random_bits(2, 8192, torch.float32))
    assert "max_bytes=100000" in pair.save(key(2), random_bits(4, 8192, torch.float32)).failed_saving[key(2)]
    assert client.exists(item_key(1))
    assert pair.worker.take_counters()["evictions"] == 0


def test_the_byte_cap_holds_with_many_writers(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    limit = 500_000
    pairs = [closing(sides(server, extra={"max_bytes": limit}, width=1024)) for _ in range(4)]
    for n in range(40):
        for number, pair in enumerate(pairs):
            pair.worker.save_caches(key(100 * number + n), random_bits(8, 1024, torch.float32))
    for pair in pairs:
        done = 0
        while done < 40:
            output = pair.report()
            assert not output.failed_saving
            done += len(output.finished_saving)
    payload = sum(client.strlen(name) for name in client.keys(b"triptych:1:{*"))
    assert 0.5 * limit < payload <= limit
    assert -client.zscore("triptych:1:index", "total") <= limit
    evictions = sum(pair.worker.take_counters()["evictions"] for pair in pairs)
    assert evictions == 160 - len(client.keys(b"triptych:1:{*"))


def test_an_item_that_others_evict_while_it_is_being_written_goes_when_it_is_there(
    server: RedisServer, client: redis.Redis, closing: Closing
) -> None:
    """It is in the index before it can be seen: to remove it then removes nothing."""
    extra = {"max_bytes": 4 * 34_000}
    slow, other = (closing(sides(server, extra=extra, width=1024)) for _ in range(2))

    def others_fill_the_cap() -> bool:
        if not client.exists(item_key(5)):
            for n in range(2, 6):
                other.save(key(n), random_bits(8, 1024, torch.float32))
        return False

    store = slow.worker._store  # type: ignore[attr-defined]
    store.write(key(1), SaveSource(random_bits(8, 1024, torch.float32), others_fill_the_cap))
    assert [client.exists(item_key(n)) for n in range(1, 6)] == [0, 1, 1, 1, 1]
    assert client.zcard("triptych:1:index") == 5, "the total, and those that are there"
    assert store.take_counters() == {"evictions": 0}
    assert other.worker.take_counters()["evictions"] == 1
    other.save(key(1), random_bits(8, 1024, torch.float32))  # it may come again
    assert [client.exists(item_key(n)) for n in range(1, 6)] == [1, 0, 1, 1, 1]


def test_what_expired_does_not_count_towards_the_cap(
    server: RedisServer, client: redis.Redis, closing: Closing
) -> None:
    pair = closing(sides(server, extra={"max_bytes": 100_000, "ttl_s": 1}, width=8192))
    pair.save(key(1), random_bits(2, 8192, torch.float32))
    poll_until(lambda: not client.exists(item_key(1)))
    pair.save(key(2), random_bits(2, 8192, torch.float32))
    assert client.zcard("triptych:1:index") == 2
    assert pair.worker.take_counters()["evictions"] == 0


def test_what_lives_on_by_being_used_goes_on_counting(
    server: RedisServer, client: redis.Redis, closing: Closing
) -> None:
    """The index's own time must not end before its items', and what it lost comes back with the next use."""
    index = "triptych:1:index"
    pair = closing(sides(server, extra={"max_bytes": 1_000_000, "ttl_s": 100}, width=1024))
    embeds = random_bits(8, 1024, torch.float32)

    def load() -> None:
        assert pair.load(key(1), 0, 8).finished_loading == [key(1)]

    def save() -> None:
        assert pair.save(key(1), embeds).finished_saving == [key(1)]

    save()
    total = client.zscore(index, "total")
    for use in (load, save):
        client.pexpire(index, 1000)
        use()
        assert client.pttl(index) > client.pttl(item_key(1))
        client.delete(index)
        use()
        assert client.zscore(index, "total") == total
        assert client.zcard(index) == 2
        use()
        assert client.zscore(index, "total") == total, "counted twice"


def test_writers_and_readers_of_the_same_keys(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    """A reader sees a whole item or none, whoever made it and however many do."""
    keys = [key(n) for n in range(6)]
    embeds = {k: random_bits(3, 30_000, torch.float32) for k in keys}
    stop = threading.Event()
    writers = [sides(server, ECRole.PRODUCER, extra=SMALL_CHUNKS, width=30_000, num_rows=1) for _ in range(8)]
    readers = [sides(server, ECRole.CONSUMER, width=30_000, num_rows=3) for _ in range(8)]
    for pair in (*writers, *readers):
        closing(pair)
    wrong: list[str] = []
    num_loaded = 0

    def write(pair: ECSides) -> None:
        for k in keys * 2:
            wrong.extend(pair.save(k, embeds[k]).failed_saving.values())

    def read(pair: ECSides) -> None:
        nonlocal num_loaded
        while not stop.is_set():
            for k in keys:
                output = pair.load(k, 0, 3)
                if output.finished_loading:
                    num_loaded += 1
                    if not same_bits(pair.buffer, embeds[k]):
                        wrong.append("bits differ")
                elif "not in the store" not in output.failed_loading[k]:
                    wrong.append(output.failed_loading[k])

    reading = [threading.Thread(target=read, args=(pair,)) for pair in readers]
    writing = [threading.Thread(target=write, args=(pair,)) for pair in writers]
    for thread in (*reading, *writing):
        thread.start()
    for thread in writing:
        thread.join()
    before = num_loaded
    poll_until(lambda: num_loaded > before + 20)
    stop.set()
    for thread in reading:
        thread.join()
    assert wrong == []
    values = -(-3 * 30_000 * 4 // (15 * 1024))
    assert client.dbsize() == len(keys) * values  # losers of the race have removed what they wrote


@pytest.mark.parametrize("password", [None, "p@ss:w/rd %#"], ids=["open", "password"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_password_and_tls(
    tmp_path: Any, closing: Closing, monkeypatch: pytest.MonkeyPatch, password: str | None, secure: bool
) -> None:
    tls = TlsFiles(tmp_path) if secure else None
    options = [] if password is None else [f'user ada on "#{_sha256(password)}" ~triptych:* +@all']
    with redis_server(*options, tls=tls) as server:
        extra: dict[str, Any] = dict(server.extra)
        if password is not None:
            monkeypatch.setenv("REDIS_PASSWORD_OF_TEST", password)
            extra |= {"username": "ada", "password_env": "REDIS_PASSWORD_OF_TEST"}
        pair = closing(ECSides(ECRedisConnector, extra, width=50_000))
        embeds = random_bits(9, 50_000, torch.float32)
        assert pair.save(key(1), embeds).finished_saving == [key(1)]
        assert pair.look_up(key(1)) is True
        assert pair.load(key(1), 3, 9).finished_loading == [key(1)]
        assert same_bits(pair.buffer[3:12], embeds)
        pair.close()


def test_password_in_the_url_and_in_a_file(tmp_path: Any, closing: Closing) -> None:
    with redis_server(password="geheim/42") as server:
        secret = tmp_path / "secret"
        secret.write_text("geheim/42\n")
        here = f"127.0.0.1:{server.port}/3"
        for extra in (
            {"url": f"redis://:geheim%2F42@{here}"},
            {"url": f"redis://{here}", "password_file": str(secret)},
        ):
            pair = closing(ECSides(ECRedisConnector, extra))
            assert pair.save(key(1), random_bits(2, 6, torch.float32)).finished_saving == [key(1)]
        with server.client(db=3) as client:
            assert client.dbsize() == 1


def test_a_unix_socket(tmp_path: Any, closing: Closing) -> None:
    path = tmp_path / "redis socket"
    with redis_server(f'unixsocket "{path}"'):
        pair = closing(ECSides(ECRedisConnector, {"url": f"unix://{path}".replace(" ", "%20")}))
        embeds = random_bits(2, 6, torch.float32)
        assert pair.save(key(1), embeds).finished_saving == [key(1)]
        assert pair.load(key(1), 0, 2).finished_loading == [key(1)]
        assert same_bits(pair.buffer[:2], embeds)


def test_a_user_needs_no_more_than_the_documented_rights(closing: Closing) -> None:
    rights = "+exists +getex +getrange +set +pexpire +renamenx +unlink +watch +unwatch +multi +exec"
    rights += " +eval +zadd +zscore +zrem +zrange +zrangebyscore +time"
    with redis_server(f"user ada on >secret ~triptych:* {rights}") as server:
        extra = {"url": f"redis://ada:secret@127.0.0.1:{server.port}", "max_bytes": 150_000, **SMALL_CHUNKS}
        pair = closing(ECSides(ECRedisConnector, extra, width=8192))
        for n in range(4):
            assert pair.save(key(n), random_bits(2, 8192, torch.float32)).finished_saving == [key(n)]
        assert pair.load(key(3), 0, 2).finished_loading == [key(3)]
        with server.client() as client:
            client.setrange(item_key(3), 1000, b"xyz")
        assert "checksum" in pair.load(key(3), 0, 2).failed_loading[key(3)]
        assert pair.look_up(key(3)) is False
        assert pair.worker.take_counters()["evictions"] == 2


def test_close_leaves_no_connection(server: RedisServer, client: redis.Redis) -> None:
    pair = sides(server)
    pair.save(key(1), random_bits(2, 6, torch.float32))
    pair.look_up(key(1))
    assert client.info("clients")["connected_clients"] >= 3
    pair.close()
    poll_until(lambda: client.info("clients")["connected_clients"] == 1)
    pair.close()
    assert pair.scheduler.has_cache_item(key(1)) in (None, True, False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
