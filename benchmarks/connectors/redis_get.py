"""Loads from a `redis-server` of its own, on loopback, beside redis-py and beside a bare socket.

    redis-py GET           one value, parsed by hiredis, copied into the buffer
    redis-py GETs          the same bytes as values of the connector's chunk size, eight in a pipeline, copied
    bare socket            one value, `recv_into` straight into the buffer, reply header and all; nothing is parsed
    bare socket, chunked   values of the connector's chunk size, asked for as far ahead as the connector does

The two with chunks are there only for items that the connector cuts into chunks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt
import redis
import redis.utils
import torch

from benchmarks.connectors.items import (
    DTYPE,
    NAMESPACE,
    WIDTH,
    empty_item,
    expect_same,
    key_of,
    random_item,
    source_of,
    targets_in,
)
from benchmarks.connectors.measuring import Comparison, Contender, Row, Settings, measure
from connectors.conformance.harnesses.redis import RedisHarness
from connectors.ec import redis_transfer
from connectors.ec.base import ECConnectorConfig, ECSide
from connectors.ec.redis_connector import _RESERVED_BYTES, ECRedisConnector, RedisOptions
from connectors.ec.redis_link import pack
from connectors.ec.store import ECStore
from core.types import ECRole

_CLIENT_GOAL, _SOCKET_GOAL = 1.0, 0.6
_SOCKET_GOAL_FROM_BYTES = 8 << 20
_PIPELINE = 8
_TIMEOUT_S = 60.0


def rows(sizes: Sequence[int], settings: Settings) -> Iterator[Row]:
    """Raises NotTriedError where there is no redis-server."""
    if not redis.utils.HIREDIS_AVAILABLE:
        raise RuntimeError("redis-py does not find hiredis, beside which the connector is to be measured")
    folder = settings.folder / "redis"
    folder.mkdir()
    server = RedisHarness(folder, {})
    try:
        server.open()
        options = RedisOptions(url=server.url(), timeout_s=_TIMEOUT_S)
        config = ECConnectorConfig(ECRole.BOTH, NAMESPACE, DTYPE, WIDTH, {"url": options.url}, lambda: None)
        connector = ECRedisConnector(config, ECSide.SCHEDULER)
        store = connector.open_store(options)
        try:
            for size_bytes in sizes:
                yield from _of_size(size_bytes, server, store, options.chunk_bytes - _RESERVED_BYTES, settings.rounds)
        finally:
            store.close()
            connector.close()
    finally:
        server.close()


class BareSocket:
    """GETs whose replies are received and not looked at: their lengths are known."""

    def __init__(self, port: int, num_bytes: int, num_values: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._array = np.zeros(num_bytes + 32 * num_values, dtype=np.uint8)

    def get(self, names: Sequence[bytes], lengths: Sequence[int], ahead: int) -> memoryview:
        """Ask for all of it, `ahead` values before the one that is received, half of them at a time. What came, reply
        headers among it. Raises OSError."""
        commands = [pack((b"GET", name)) for name in names]
        view = memoryview(self._array.data)
        num_asked = received = next_end = 0
        for number, length in enumerate(lengths):
            if num_asked < len(commands) and num_asked - number <= ahead // 2:
                self._socket.sendall(b"".join(commands[num_asked : number + ahead]))
                num_asked = min(len(commands), number + ahead)
            next_end += len(b"$%d\r\n" % length) + length + 2
            while received < next_end:
                count = self._socket.recv_into(view[received:])
                if not count:
                    raise ConnectionError("Redis closed the connection")
                received += count
        return view[:received]

    def __enter__(self) -> BareSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def _of_size(size_bytes: int, server: RedisHarness, store: ECStore, chunk_bytes: int, rounds: int) -> list[Row]:
    item, buffer = random_item(size_bytes), empty_item(size_bytes)
    target = targets_in(buffer)
    raw, flat = _flat(item), _flat(buffer)
    key = key_of(size_bytes)
    begins = range(0, size_bytes, chunk_bytes)
    names = [b"bench:%d" % begin for begin in begins]
    lengths = [min(chunk_bytes, size_bytes - begin) for begin in begins]
    store.write(key, source_of(item))
    case = "Redis load"
    socket_goal = _SOCKET_GOAL if size_bytes >= _SOCKET_GOAL_FROM_BYTES else None
    with server.client() as client, BareSocket(server.port, size_bytes, len(names)) as bare:
        client.set("bench", raw.tobytes())

        def get() -> None:
            store.read(key, target())

        def get_client() -> None:
            flat[:] = np.frombuffer(_bytes(client.get("bench")), dtype=np.uint8)

        def get_chunks() -> None:
            begin = 0
            for first in range(0, len(names), _PIPELINE):
                with client.pipeline(transaction=False) as pipeline:
                    for name in names[first : first + _PIPELINE]:
                        pipeline.get(name)
                    for value in pipeline.execute():
                        flat[begin : begin + len(value)] = np.frombuffer(value, dtype=np.uint8)
                        begin += len(value)

        ahead = max(2, redis_transfer._AHEAD_BYTES // chunk_bytes)
        contenders = {
            "ours": Contender(get),
            "redis-py GET": Contender(get_client),
            "bare socket": Contender(lambda: bare.get([b"bench"], [size_bytes], 2)),
        }
        comparisons = [
            Comparison(case, "ours", "redis-py GET", _CLIENT_GOAL),
            Comparison(case, "ours", "bare socket", socket_goal),
        ]
        if len(names) > 1:
            for name, begin, length in zip(names, begins, lengths, strict=True):
                client.set(name, raw[begin : begin + length].tobytes())
            contenders["redis-py GETs"] = Contender(get_chunks)
            contenders["bare socket, chunked"] = Contender(lambda: bare.get(names, lengths, ahead))
            comparisons.append(Comparison(case, "ours", "redis-py GETs", _CLIENT_GOAL))
            comparisons.append(Comparison(case, "ours", "bare socket, chunked", socket_goal))
        for way in (get, get_client, *([get_chunks] if len(names) > 1 else [])):
            way()
            expect_same("a load from Redis", buffer, item)
        if bytes(bare.get([b"bench"], [size_bytes], 2)[-2 - size_bytes : -2]) != raw.tobytes():
            raise RuntimeError("bare socket: what arrived is not what was sent")
        found = measure(size_bytes, contenders, comparisons, rounds)
        client.flushall()
    return found


def _flat(item: torch.Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = item.view(torch.uint8).view(-1).numpy()
    return array


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise RuntimeError("Redis does not have the value any more")
    return value
