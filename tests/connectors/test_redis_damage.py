"""Whatever stands in Redis, a load ends as the right tensor or as a reason, and a save puts it right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis
import torch

from connectors.ec.redis_connector import ECRedisConnector
from connectors.ec.redis_format import PREFIX, ItemHead, encode_head, parse_head
from tests.connectors.redis_server import RedisServer, redis_server
from tests.connectors.support import (
    NAMESPACE,
    ECSides,
    key,
    random_bits,
    same_bits,
)
from tests.connectors.test_redis import SMALL_CHUNKS, item_key

Closing = Callable[[ECSides], ECSides]
Spoil = Callable[[redis.Redis], None]

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


def chunk(client: redis.Redis, number: int, item: int = 1) -> bytes:
    (name,) = client.keys(item_key(item) + b":*:%d" % number)
    return name


def flip(offset: int) -> Spoil:
    def spoil(client: redis.Redis) -> None:
        raw = bytearray(client.get(item_key(1)))
        raw[offset] ^= 1
        client.set(item_key(1), bytes(raw))

    return spoil


def cut(num_bytes: int) -> Spoil:
    def spoil(client: redis.Redis) -> None:
        raw = client.get(item_key(1))
        client.set(item_key(1), raw[: num_bytes if num_bytes >= 0 else len(raw) + num_bytes])

    return spoil


def rewrite_head(**changes: Any) -> Spoil:
    def spoil(client: redis.Redis) -> None:
        raw = client.get(item_key(1))
        head = parse_head(raw)
        payload = raw[len(encode_head(head)) :]
        client.set(item_key(1), encode_head(msgspec.structs.replace(head, **changes)) + payload)

    return spoil


def raise_version(client: redis.Redis) -> None:
    raw = client.get(item_key(1))
    magic, version, length = PREFIX.unpack_from(raw)
    client.set(item_key(1), PREFIX.pack(magic, version + 1, length) + raw[PREFIX.size :])


def flip_in_a_chunk(client: redis.Redis) -> None:
    client.setrange(chunk(client, 3), 77, bytes([client.getrange(chunk(client, 3), 77, 77)[0] ^ 1]))


def swap_chunks(client: redis.Redis) -> None:
    one, other = chunk(client, 1), chunk(client, 2)
    values = client.get(one), client.get(other)
    client.set(one, values[1])
    client.set(other, values[0])


def swap_items(client: redis.Redis) -> None:
    client.copy(item_key(2), item_key(1), replace=True)


def put_a_list(client: redis.Redis) -> None:
    client.unlink(item_key(1))
    client.rpush(item_key(1), "not a string")


@pytest.mark.parametrize(
    ("spoil", "reason", "is_removed"),
    [
        (lambda client: client.unlink(item_key(1)), "not in the store", True),
        (cut(-1), "cut short", True),
        (cut(100), "header", True),
        (cut(3), "cut short", True),
        (cut(0), "cut short", True),
        (lambda client: client.append(item_key(1), "x"), "cut short", True),
        (lambda client: client.set(item_key(1), "somebody else's value"), "something else", True),
        (lambda client: client.set(item_key(1), bytes(1 << 23)), "something else", True),
        (put_a_list, "something else", True),
        (flip(0), "something else", True),
        (flip(7), "header", True),
        (lambda client: client.setrange(item_key(1), 6, b"\xff\xff"), "claims", True),
        (flip(9), "header", True),
        (flip(-1), "checksum", True),
        (flip_in_a_chunk, "checksum", True),
        (swap_chunks, "checksum", True),
        (swap_items, "key of the item", True),
        (lambda client: client.unlink(chunk(client, 4)), "chunks is gone", True),
        (lambda client: client.append(chunk(client, 4), "x"), "another length", True),
        (lambda client: client.setrange(chunk(client, 6), 9000, "x" * 90_000), "another length", True),
        (lambda client: client.set(chunk(client, 6), ""), "another length", True),
        (rewrite_head(namespace="9" * 64), "namespace", True),
        (rewrite_head(namespace=NAMESPACE[:16] + "9" * 48), "namespace", True),
        (rewrite_head(num_bytes=1 << 40), "contradicts", True),
        (rewrite_head(num_bytes=1 << 47, shape=(1 << 40, 32)), "shape", False),
        (rewrite_head(chunk_bytes=1), "header", True),
        (rewrite_head(chunk_bytes=1 << 29), "cut short", True),
        (rewrite_head(token=bytes(8)), "chunks is gone", True),
        (rewrite_head(xxh3_128=bytes(16)), "checksum", True),
        (rewrite_head(dtype="float64"), "contradicts", True),
        (rewrite_head(dtype="float16", shape=(ROWS, 2 * WIDTH)), "dtype", False),
        (rewrite_head(shape=(WIDTH, ROWS)), "shape", False),
        (raise_version, "format version", False),
    ],
)
def test_a_spoilt_item_fails_as_data(
    server: RedisServer, client: redis.Redis, closing: Closing, spoil: Spoil, reason: str, is_removed: bool
) -> None:
    pair = closing(sides(server))
    embeds = random_bits(ROWS, WIDTH, torch.float32)
    pair.save(key(1), embeds)
    pair.save(key(2), embeds)
    spoil(client)

    output = pair.load(key(1), 8, ROWS)
    assert output.finished_loading == []
    assert list(output.failed_loading) == [key(1)]
    assert reason in output.failed_loading[key(1)]
    assert not pair.buffer[:8].any()
    assert not pair.buffer[13:].any()
    assert pair.look_up(key(1)) is not is_removed

    assert pair.load(key(2), 20, ROWS).finished_loading == [key(2)]
    assert same_bits(pair.buffer[20:25], embeds)
    # What is wrong with an item does not count against the store, and a save puts it right.
    assert pair.worker.take_counters()["breaker_opens"] == 0
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert pair.load(key(1), 8, ROWS).finished_loading == [key(1)]
    assert same_bits(pair.buffer[8:13], embeds)


def test_a_damaged_item_takes_its_chunks_along(server: RedisServer, client: redis.Redis, closing: Closing) -> None:
    pair = closing(sides(server))
    pair.save(key(1), random_bits(ROWS, WIDTH, torch.float32))
    assert client.dbsize() == 7
    flip_in_a_chunk(client)
    pair.load(key(1), 0, ROWS)
    assert client.dbsize() == 0


def test_a_good_item_that_replaced_a_damaged_one_is_not_removed(
    server: RedisServer, client: redis.Redis, closing: Closing
) -> None:
    """Two readers find it damaged; between the look of the second one and its removal a writer has repaired it."""
    pair = closing(sides(server))
    embeds = random_bits(ROWS, WIDTH, torch.float32)
    pair.save(key(1), embeds)
    damaged = client.getrange(item_key(1), 0, 300)
    client.unlink(item_key(1))
    pair.save(key(1), embeds)
    store: Any = pair.worker._store
    store._remove_if(key(1), damaged[: len(encode_head(parse_head(damaged)))])
    assert pair.load(key(1), 0, ROWS).finished_loading == [key(1)]


def test_head_fields_are_only_ever_appended() -> None:
    """The bytes of version 1, written by hand."""
    head = ItemHead("a" * 64, "b" * 64, "float32", (2, 3), 24, 4096, bytes(range(16)), b"tokentok")
    body = (
        b"\x98\xd9\x40" + b"a" * 64 + b"\xd9\x40" + b"b" * 64 + b"\xa7float32\x92\x02\x03\x18\xcd\x10\x00\xc4\x10"
    ) + bytes(range(16))
    assert encode_head(head) == b"TrEC\x01\x00" + bytes([len(body) + 10, 0]) + body + b"\xc4\x08tokentok"
