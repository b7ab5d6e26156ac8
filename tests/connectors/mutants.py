"""Connectors broken on purpose, each in one way and a few lines, over the one of the documentation, which is good."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import torch
import xxhash

from connectors.ec.store import ItemError, LoadTarget, SaveSource, StoreError
from examples.sqlite_connector import ECSqliteConnector, SqliteOptions, SqliteStore, _shape, checksum_of


class Mutant(ECSqliteConnector):
    """Over a store of a class that is broken, or broken itself."""

    #: The check that is there to catch it, and words that its reason has.
    caught_by: ClassVar[tuple[str, str]]
    Store: ClassVar[type[SqliteStore]] = SqliteStore

    def open_store(self, options: SqliteOptions) -> SqliteStore:
        return self.Store(options, self.config.namespace)


# ---- items that are visible before they are whole, or never are ----


class HalfWritten(SqliteStore):
    def write(self, key: str, source: SaveSource) -> None:
        whole = source.embeds
        super().write(key, SaveSource(torch.zeros_like(whole), source.check))
        time.sleep(0.05)  # the fault: slow enough to be read half-way
        payload = bytes(source.data)
        checksum = checksum_of(self._namespace, key, _shape(whole), payload)
        with self._database() as db:
            db.execute("UPDATE items SET payload = ?, checksum = ? WHERE namespace = ? AND key = ?",
                       (payload, checksum, self._namespace, key))  # fmt: skip


class WritesInPlace(Mutant):
    caught_by = ("concurrency/reader_during_write", "wrong")
    Store = HalfWritten


class TwoStepStore(SqliteStore):
    def write(self, key: str, source: SaveSource) -> None:
        super().write(key, source)
        with self._database() as db:
            db.execute("UPDATE items SET checksum = 'later' || checksum WHERE namespace = ? AND key = ?",
                       (self._namespace, key))  # fmt: skip
        time.sleep(0.05)  # the fault: slow enough to be read half-way
        with self._database() as db:
            db.execute("UPDATE items SET checksum = substr(checksum, 6) WHERE namespace = ? AND key = ?",
                       (self._namespace, key))  # fmt: skip


class VisibleTooEarly(Mutant):
    caught_by = ("concurrency/reader_during_write", "visible before")
    Store = TwoStepStore


class CuttingStore(SqliteStore):
    def write(self, key: str, source: SaveSource) -> None:
        payload = bytes(source.data)[: 1 << 20]
        super().write(key, source)
        with self._database() as db:
            checksum = checksum_of(self._namespace, key, _shape(source.embeds), payload)
            db.execute("UPDATE items SET payload = ?, checksum = ? WHERE namespace = ? AND key = ?",
                       (payload, checksum, self._namespace, key))  # fmt: skip


class Truncates(Mutant):
    caught_by = ("round_trip/sizes", "cut short")
    Store = CuttingStore


class LockingStore(SqliteStore):
    def write(self, key: str, source: SaveSource) -> None:
        lock = Path(f"{self._options.path}.{key}.lock")
        try:
            lock.touch(exist_ok=False)
        except FileExistsError:
            raise StoreError("somebody else is writing it") from None
        time.sleep(0.05)  # the fault: holds its lock long enough to be killed
        super().write(key, source)
        lock.unlink()


class DeadWritersBlock(Mutant):
    caught_by = ("concurrency/writer_killed", "somebody else is writing")
    Store = LockingStore


# ---- what is read is not verified ----


class TrustingStore(SqliteStore):
    checked: ClassVar[Sequence[str]] = ()

    def read(self, key: str, target: LoadTarget) -> None:
        with self._database() as db:
            row = db.execute("SELECT version, shape, checksum, payload FROM items WHERE namespace = ? AND key = ?",
                             (self._namespace, key)).fetchone()  # fmt: skip
        if row is None or row[3] is None:
            raise ItemError("item is not in the store")
        if "version" in self.checked and row[0] != 1:
            raise ItemError("another version")
        if "shape" in self.checked and row[1] != _shape(target):
            raise ItemError("another shape")
        if "payload" in self.checked and row[2] != self.checksum(key, row[1], row[3]):
            raise ItemError("damaged")
        target.write(row[3][: target.num_bytes])

    def checksum(self, key: str, shape: str, payload: bytes) -> str:
        return checksum_of(self._namespace, key, shape, payload)


class NoChecksum(Mutant):
    caught_by = ("damage/flipped_bit", "wrong")

    class Store(TrustingStore):
        checked = ("version", "shape")


class NoShape(Mutant):
    caught_by = ("round_trip/not_as_ordered", "another shape")

    class Store(TrustingStore):
        checked = ("version", "payload")


class AnyVersion(Mutant):
    caught_by = ("damage/newer_version", "wrong")

    class Store(TrustingStore):
        checked = ("shape", "payload")


class Anybodys(TrustingStore):
    """Its checksum covers the payload, not whose it is."""

    checked = ("version", "shape", "payload")

    def write(self, key: str, source: SaveSource) -> None:
        super().write(key, source)
        checksum = xxhash.xxh3_128_hexdigest(bytes(source.data))
        with self._database() as db:
            db.execute("UPDATE items SET checksum = ? WHERE namespace = ? AND key = ?",
                       (checksum, self._namespace, key))  # fmt: skip

    def checksum(self, key: str, shape: str, payload: bytes) -> str:
        return str(xxhash.xxh3_128_hexdigest(payload))


class ChecksumOfPayloadAlone(Mutant):
    caught_by = ("damage/misplaced", "wrong")
    Store = Anybodys


class ForeignAccepted(Mutant):
    caught_by = ("damage/foreign", "wrong")
    Store = Anybodys


# ---- keys and namespaces ----


class ShortKeys(Mutant):
    caught_by = ("keys/similar", "one digit")

    class Store(SqliteStore):
        def contains(self, keys: Sequence[str]) -> list[bool]:
            return super().contains([key[:16] for key in keys])

        def read(self, key: str, target: LoadTarget) -> None:
            super().read(key[:16], target)

        def write(self, key: str, source: SaveSource) -> None:
            super().write(key[:16], source)


class OneNamespace(Mutant):
    caught_by = ("keys/namespaces", "another namespace")

    class Store(SqliteStore):
        def __init__(self, options: SqliteOptions, namespace: str) -> None:
            super().__init__(options, "the only one")


# ---- limits ----


class IgnoresCapacity(Mutant):
    caught_by = ("limits/capacity", "more than its cap")

    def open_store(self, options: SqliteOptions) -> SqliteStore:
        return SqliteStore(msgspec.structs.replace(options, capacity_bytes=1 << 40), self.config.namespace)


class KeepsOne(Mutant):
    caught_by = ("limits/capacity", "the store holds 1 of")

    class Store(SqliteStore):
        def write(self, key: str, source: SaveSource) -> None:
            super().write(key, source)
            with self._database() as db:
                db.execute("DELETE FROM items WHERE key != ?", (key,))


class ServesStale(Mutant):
    caught_by = ("limits/time_to_live", "is found")

    class Store(SqliteStore):
        def _oldest_s(self) -> float:
            return 0.0
