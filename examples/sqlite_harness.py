"""What the conformance kit may do to the store of examples/sqlite_connector.py: move, lock, fill and edit the file."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from connectors.conformance import Damage, Harness, StoredItem
from connectors.conformance.harnesses.volume import Volume
from examples.sqlite_connector import checksum_of

_COLUMNS = "version, shape, checksum, num_bytes, payload"


class SqliteHarness(Harness):
    """A database on a small file system of its own, where one can be mounted."""

    def __init__(self, folder: Path, extra: Mapping[str, Any]) -> None:
        super().__init__(folder, extra)
        self._volume = Volume(folder / "volume")
        self._path = self._volume.folder / "data" / "items.db"
        self._num_fresh = 0
        self._lock: sqlite3.Connection | None = None

    def open(self) -> None:
        self._volume.open()
        self._path.parent.mkdir()

    def extra(self) -> Mapping[str, Any]:
        return {**self.operators_extra, "path": str(self._path)}

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return {"timeout_s": seconds}

    def capacity(self, num_bytes: int) -> Mapping[str, Any]:
        return {**self._fresh(), "capacity_bytes": num_bytes}

    def ttl(self, seconds: float) -> Mapping[str, Any]:
        return {**self._fresh(), "ttl_s": seconds}

    def stop(self) -> None:
        self._path.parent.rename(self._volume.folder / "away")

    def start(self) -> None:
        (self._volume.folder / "away").rename(self._path.parent)

    def fill(self) -> None:
        self._volume.fill()

    def free(self) -> None:
        self._volume.free()

    def slow(self, items: Sequence[StoredItem]) -> None:
        self._lock = sqlite3.connect(self._path)
        self._lock.execute("BEGIN EXCLUSIVE")  # whoever wants to read or write waits

    def unslow(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def damage(self, item: StoredItem, how: Damage, other: StoredItem | None) -> None:
        edit = {
            Damage.GARBAGE: "payload = randomblob(num_bytes), checksum = hex(randomblob(16)), shape = 'x'",
            Damage.TRUNCATED: "payload = substr(payload, 1, num_bytes - 1)",
            Damage.EMPTIED: "payload = NULL",
        }.get(how)
        with contextlib.closing(sqlite3.connect(self._path)) as db, db:
            rows = [_row(db, each) for each in (item, other) if each is not None]
            if how is Damage.FLIPPED_BIT:
                payload = bytearray(rows[0][-1])
                payload[-1] ^= 1
                _set(db, item, "payload = ?", (bytes(payload),))
            elif how in (Damage.OLDER_VERSION, Damage.NEWER_VERSION):
                version, shape, _, _, payload = rows[0]
                inverted = bytes(byte ^ 0xFF for byte in payload)
                checksum = checksum_of(item.namespace, item.key, shape, inverted)
                version += 1 if how is Damage.NEWER_VERSION else -1
                _set(db, item, "(version, checksum, payload) = (?, ?, ?)", (version, checksum, inverted))
            elif how is Damage.SWAPPED and other is not None:
                _set(db, item, "payload = ?", rows[1][-1:])
                _set(db, other, "payload = ?", rows[0][-1:])
            elif edit is not None:
                _set(db, item, edit, ())
            else:  # MISPLACED, FOREIGN
                _set(db, item, f"({_COLUMNS}) = (?, ?, ?, ?, ?)", rows[1])

    def left_overs(self) -> list[str]:
        return [path.name for path in self._path.parent.iterdir() if path != self._path]

    def restore(self) -> None:
        self.unslow()
        self.free()
        if not self._path.parent.exists():
            self.start()

    def close(self) -> None:
        self.unslow()
        self._volume.close()

    def _fresh(self) -> dict[str, str]:
        self._num_fresh += 1
        return {"path": str(self._path.parent.with_name(f"fresh-{self._num_fresh}.db"))}


def _row(db: sqlite3.Connection, item: StoredItem) -> tuple[Any, ...]:
    where = (item.namespace, item.key)
    row = db.execute(f"SELECT {_COLUMNS} FROM items WHERE namespace = ? AND key = ?", where).fetchone()  # noqa: S608
    return tuple(row)


def _set(db: sqlite3.Connection, item: StoredItem, edit: str, values: Sequence[Any]) -> None:
    where = (item.namespace, item.key)
    db.execute(f"UPDATE items SET {edit} WHERE namespace = ? AND key = ?", (*values, *where))  # noqa: S608
