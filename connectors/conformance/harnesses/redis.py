"""Faults for `ECRedisConnector`: a `redis-server` of its own that is killed, frozen, filled and edited."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
import xxhash

from connectors.conformance.harness import Damage, Harness, NotTriedError, StoredItem
from connectors.ec.redis_format import FORMAT_VERSION, PREFIX, ItemHead, encode_head, item_name, parse_head
from core.ports import free_ports

_START_S = 10.0
_LISTINGS = ("keys", "scan", "dbsize", "randomkey")


class RedisHarness(Harness):
    """A server on a free loopback port, without persistence. `launch` is for servers with TLS, users and the like."""

    def __init__(self, folder: Path, extra: Mapping[str, Any]) -> None:
        super().__init__(folder, extra)
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    # ---- what a subclass may change ----

    def server_options(self) -> Sequence[str]:
        """Lines of the server's configuration."""
        return [f"port {self.port}"]

    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """To be closed by the caller; `with` does it."""
        return redis.Redis("127.0.0.1", self.port, socket_timeout=5, protocol=2)

    # ---- the harness ----

    def open(self) -> None:
        if shutil.which("redis-server") is None:
            raise NotTriedError("there is no redis-server on this machine")
        lines = ["bind 127.0.0.1", 'save ""', "appendonly no", *self.server_options()]
        (self.folder / "redis.conf").write_text("\n".join(lines) + "\n")
        self.start()

    def extra(self) -> Mapping[str, Any]:
        return {**self.operators_extra, "url": self.url()}

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return {"timeout_s": seconds}

    def capacity(self, num_bytes: int) -> Mapping[str, Any]:
        self._flush()
        return {"max_bytes": num_bytes}

    def ttl(self, seconds: float) -> Mapping[str, Any]:
        return {"ttl_s": seconds}

    def stop(self) -> None:
        """As a crash does it; what it held is lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def start(self) -> None:
        if self._process is not None:
            return
        with (self.folder / "redis.log").open("ab") as log:
            command = ["redis-server", str(self.folder / "redis.conf")]
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)  # noqa: S603
        deadline_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(redis.ConnectionError), self.client() as client:
                client.ping()
                return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise NotTriedError("redis-server did not start")
            time.sleep(0.01)

    def fill(self) -> None:
        with self.client() as client:
            used = int(client.info("memory")["used_memory"])
            client.config_set("maxmemory", used + (1 << 16))

    def free(self) -> None:
        with self.client() as client:
            client.config_set("maxmemory", 0)

    def slow(self, items: Sequence[StoredItem]) -> None:
        """Connections stay, and the kernel goes on accepting; nobody answers."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGSTOP)

    def unslow(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def damage(self, item: StoredItem, how: Damage, other: StoredItem | None) -> None:
        """Items of the checks that ask for damage have one chunk, which stands behind the head."""
        name = item_name(item.namespace, item.key)
        theirs = item_name(other.namespace, other.key) if other is not None else b""
        with self.client() as client:
            raw = _get(client, name)
            head, payload = _split(raw)
            if how is Damage.FLIPPED_BIT:
                spoilt = raw[:-1] + bytes([raw[-1] ^ 1])
            elif how is Damage.GARBAGE:
                spoilt = os.urandom(len(raw))
            elif how is Damage.TRUNCATED:
                spoilt = raw[:-1]
            elif how is Damage.EMPTIED:
                spoilt = b""
            elif how is Damage.SWAPPED:
                their_head, their_payload = _split(_get(client, theirs))
                spoilt = encode_head(head) + their_payload
                client.set(theirs, encode_head(their_head) + payload, keepttl=True)
            elif how in (Damage.MISPLACED, Damage.FOREIGN):
                spoilt = _get(client, theirs)
            else:
                spoilt = _as_version(head, payload, FORMAT_VERSION + (1 if how is Damage.NEWER_VERSION else -1))
            client.set(name, spoilt, keepttl=True)

    def left_overs(self) -> list[str]:
        """Values that belong to no item: a name with a token that the item's head does not have."""
        with self.client() as client:
            names = [bytes(name) for name in client.scan_iter("triptych:*")]
            tokens = {name: _split(_get(client, name))[0].token.hex() for name in names if name.endswith(b"}")}
        parts = [name for name in names if not name.endswith((b"}", b":index"))]
        return [name.decode() for name in parts if _token(name) != tokens.get(name[: name.index(b"}") + 1])]

    def num_listings(self) -> int:
        with self.client() as client:
            stats: Mapping[str, Any] = client.info("commandstats")
        return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in _LISTINGS)

    def restore(self) -> None:
        if self._process is None:
            self.start()
        self.unslow()
        self.free()
        self._flush()  # parts of what killed writers wrote go by themselves, later

    def close(self) -> None:
        self.stop()

    def _flush(self) -> None:
        with self.client() as client:
            client.flushall()


def _get(client: redis.Redis, name: bytes) -> bytes:
    raw = client.get(name)
    if not isinstance(raw, bytes):
        raise NotTriedError("the item has gone")
    return raw


def _split(raw: bytes) -> tuple[ItemHead, bytes]:
    head = parse_head(raw)
    return head, raw[len(encode_head(head)) :]


def _as_version(head: ItemHead, payload: bytes, version: int) -> bytes:
    inverted = bytes(byte ^ 0xFF for byte in payload)
    changed = ItemHead(
        head.namespace,
        head.key,
        head.dtype,
        head.shape,
        head.num_bytes,
        head.chunk_bytes,
        xxhash.xxh3_128_digest(inverted),
        head.token,
    )
    raw = encode_head(changed)
    magic, _, length = PREFIX.unpack(raw[: PREFIX.size])
    return PREFIX.pack(magic, version, length) + raw[PREFIX.size :] + inverted


def _token(name: bytes) -> str:
    return name.decode().rsplit(":", 2)[-2]
