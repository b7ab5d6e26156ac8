"""An encoder-cache connector over a SQLite file, complete: the one that docs/connectors.md builds."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import xxhash

from connectors.ec.store import CHUNK_BYTES, ECStore, ItemError, LoadTarget, SaveSource, StoreError
from connectors.ec.store_connector import ECStoreConnector, StoreOptions

_SCHEMA = """CREATE TABLE IF NOT EXISTS items (namespace TEXT, key TEXT, version INT, shape TEXT, checksum TEXT,
    used_s REAL, num_bytes INT, payload BLOB, PRIMARY KEY (namespace, key))"""
_VERSION = 1


class SqliteOptions(StoreOptions, frozen=True, kw_only=True):
    """The keys of --ec-connector-extra-config."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    capacity_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1 << 30
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 86_400.0


class ECSqliteConnector(ECStoreConnector):
    """One row an item."""

    options_type = SqliteOptions

    def open_store(self, options: SqliteOptions) -> SqliteStore:
        return SqliteStore(options, self.config.namespace)


class SqliteStore(ECStore):
    """The items of one namespace. A connection a call, so any thread may call."""

    def __init__(self, options: SqliteOptions, namespace: str) -> None:
        self._options = options
        self._namespace = namespace

    def contains(self, keys: Sequence[str]) -> list[bool]:
        sql = "SELECT 1 FROM items WHERE namespace = ? AND key = ? AND used_s > ?"
        with self._database() as db:
            return [db.execute(sql, (self._namespace, key, self._oldest_s())).fetchone() is not None for key in keys]

    def read(self, key: str, target: LoadTarget) -> None:
        sql = """SELECT rowid, version, shape, checksum, length(payload) FROM items
                 WHERE namespace = ? AND key = ? AND used_s > ?"""
        shape = _shape(target)
        computed = _hasher(self._namespace, key, shape)
        with self._database() as db:
            db.execute("BEGIN")  # row and payload of one moment
            row = db.execute(sql, (self._namespace, key, self._oldest_s())).fetchone()
            if row is None:
                raise ItemError("item is not in the store")
            rowid, *actual, checksum, num_bytes = row
            if actual != [_VERSION, shape]:
                raise ItemError(f"the item is version {actual[0]} of shape {actual[1]}, not {_VERSION} of {shape}")
            if num_bytes != target.num_bytes:
                raise ItemError("item is cut short", damaged=True)
            with db.blobopen("items", "payload", rowid, readonly=True) as blob:
                for offset in range(0, num_bytes, CHUNK_BYTES):
                    piece = blob.read(CHUNK_BYTES)
                    computed.update(piece)
                    target.write(piece, offset)
        if checksum != computed.hexdigest():
            raise ItemError("checksum of the item does not match", damaged=True)
        with self._database() as db:
            db.execute("UPDATE items SET used_s = ? WHERE namespace = ? AND key = ?",
                       (time.time(), self._namespace, key))  # fmt: skip

    def write(self, key: str, source: SaveSource) -> None:
        payload = source.data
        if payload.nbytes > self._options.capacity_bytes:
            raise ItemError(f"an item of {payload.nbytes} bytes is larger than capacity_bytes")
        shape = _shape(source.embeds)
        row = (
            self._namespace,
            key,
            _VERSION,
            shape,
            checksum_of(self._namespace, key, shape, payload),
            time.time(),
            payload.nbytes,
        )
        with self._database() as db:  # one transaction: readers see all of it or nothing
            db.execute("REPLACE INTO items VALUES (?, ?, ?, ?, ?, ?, ?, zeroblob(?))", (*row, payload.nbytes))
            (rowid,) = db.execute("SELECT last_insert_rowid()").fetchone()
            with db.blobopen("items", "payload", rowid) as blob:
                for offset in range(0, payload.nbytes, CHUNK_BYTES):
                    blob.write(payload[offset : offset + CHUNK_BYTES])
            db.execute("DELETE FROM items WHERE used_s <= ?", (self._oldest_s(),))
            while db.execute("SELECT total(num_bytes) FROM items").fetchone()[0] > self._options.capacity_bytes:
                db.execute("DELETE FROM items WHERE used_s = (SELECT min(used_s) FROM items)")
            source.check()  # the time limit may be over, and the memory somebody else's

    def close(self) -> None:
        """Nothing is held open."""

    def _oldest_s(self) -> float:
        return time.time() - self._options.ttl_s

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self._options.path, self._options.timeout_s / 2)) as db, db:
                db.execute(_SCHEMA)
                yield db
        except sqlite3.Error as error:
            raise StoreError(f"SQLite: {error}") from None


def _shape(item: Any) -> str:
    return f"{item.shape[0]}x{item.shape[1]} {item.dtype}"


def _hasher(namespace: str, key: str, shape: str) -> Any:
    """Covers whose payload it is, too: a row in another one's place does not pass."""
    return xxhash.xxh3_128(f"{namespace} {key} {shape}".encode())


def checksum_of(namespace: str, key: str, shape: str, payload: bytes | memoryview) -> str:
    hasher = _hasher(namespace, key, shape)
    hasher.update(payload)
    return str(hasher.hexdigest())
