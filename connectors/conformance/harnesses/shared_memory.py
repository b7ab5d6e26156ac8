"""Faults for `ECSharedMemoryConnector`: an arena that is removed, locked, out of memory and scribbled over."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from connectors.conformance.harness import Damage, Harness, NotTriedError, StoredItem
from connectors.conformance.harnesses.volume import Volume
from connectors.ec.shm_layout import ENTRY_BYTES, STATIC_BYTES, Entry, Geometry, parse_entry, parse_header
from connectors.ec.shm_locks import MUTEX, FileLocks

_CAPACITY_BYTES = 640 << 20
_READY = 2


class SharedMemoryHarness(Harness):
    """An arena on a small file system of its own. Every process that uses it maps it, so damage is seen at once."""

    def __init__(self, folder: Path, extra: Mapping[str, Any]) -> None:
        super().__init__(folder, extra)
        self._volume = Volume(folder / "volume")
        self._num_fresh = 0
        self._path = folder / "volume" / "arena"
        self._lock: int | None = None

    def open(self) -> None:
        self._volume.open()

    def extra(self) -> Mapping[str, Any]:
        return {"capacity_bytes": _CAPACITY_BYTES, **self.operators_extra, "path": str(self._path)}

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return {"timeout_s": seconds}

    def capacity(self, num_bytes: int) -> Mapping[str, Any]:
        return {**self._fresh(), "capacity_bytes": num_bytes}

    def ttl(self, seconds: float) -> Mapping[str, Any]:
        return {**self._fresh(), "ttl_s": seconds}

    def stop(self) -> None:
        """The arena is removed under everybody's feet."""
        self._path.unlink(missing_ok=True)

    def start(self) -> None:
        """Whoever wants to write makes another one."""

    def fill(self) -> None:
        self._volume.fill()

    def free(self) -> None:
        self._volume.free()

    def slow(self, items: Sequence[StoredItem]) -> None:
        """Somebody holds the arena's lock and does not go on."""
        self._lock = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        FileLocks(self._lock).lock(MUTEX, 5.0)

    def unslow(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def damage(self, item: StoredItem, how: Damage, other: StoredItem | None) -> None:
        if how in (Damage.OLDER_VERSION, Damage.NEWER_VERSION):
            raise NotTriedError(
                "the version is that of the whole arena: ConfigError at the start, in the tests of its own"
            )
        with _Arena(self._path) as arena:
            slot, entry = arena.find(item)
            blocks = arena.blocks(slot, entry)
            payload = b"".join(arena.read(*block) for block in blocks)
            if how is Damage.FLIPPED_BIT:
                arena.write(blocks, payload[:-1] + bytes([payload[-1] ^ 1]))
            elif how is Damage.GARBAGE:
                arena.write(blocks, os.urandom(len(payload)))
                arena.write_entry(slot, os.urandom(ENTRY_BYTES))
            elif how is Damage.TRUNCATED:
                arena.write(blocks, payload[: len(payload) // 2] + bytes(len(payload) - len(payload) // 2))
            elif how is Damage.EMPTIED:
                arena.write_entry(slot, bytes(ENTRY_BYTES))
            elif other is not None:
                their_slot, their_entry = arena.find(other)
                their_blocks = arena.blocks(their_slot, their_entry)
                theirs = b"".join(arena.read(*block) for block in their_blocks)
                arena.write(blocks, theirs)
                if how is Damage.SWAPPED:
                    arena.write(their_blocks, payload)
                else:  # MISPLACED, FOREIGN: their entry too
                    arena.write_entry(slot, arena.read_entry(their_slot))

    def left_overs(self) -> list[str]:
        return [path.name for path in self._volume.folder.iterdir() if path != self._path]

    def restore(self) -> None:
        self.unslow()
        self.free()
        for path in self._volume.folder.iterdir():  # what engines that were killed left there
            path.unlink()

    def close(self) -> None:
        self.unslow()
        self._volume.close()

    def _fresh(self) -> dict[str, str]:
        self._num_fresh += 1
        return {"path": str(self._path.with_name(f"fresh-{self._num_fresh}"))}


class _Arena:
    """The file, read and written behind everybody's back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b", buffering=0)
        self.geometry: Geometry
        self.geometry, self.arena_id = parse_header(self._at(0, STATIC_BYTES))

    def __enter__(self) -> _Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def find(self, item: StoredItem) -> tuple[int, Entry]:
        states = self._at(self.geometry.states_offset, self.geometry.num_slots)
        wanted = bytes.fromhex(item.namespace), bytes.fromhex(item.key)
        for slot, state in enumerate(states):
            entry = parse_entry(self.read_entry(slot), self.arena_id, slot) if state == _READY else None
            if entry is not None and (entry.name.namespace, entry.name.key) == wanted:
                return slot, entry
        raise NotTriedError("the item has gone")

    def blocks(self, slot: int, entry: Entry) -> list[tuple[int, int]]:
        """Offset and length of each part of the payload."""
        owners = self._at(self.geometry.owners_offset, 4 * self.geometry.num_blocks)
        numbers = [
            n
            for n in range(self.geometry.num_blocks)
            if int.from_bytes(owners[4 * n : 4 * n + 4], "little") == slot + 1
        ]
        size = self.geometry.block_bytes
        lengths = [min(size, entry.num_bytes - i * size) for i in range(len(numbers))]
        return [(self.geometry.data_offset + n * size, length) for n, length in zip(numbers, lengths, strict=True)]

    def read(self, offset: int, length: int) -> bytes:
        return self._at(offset, length)

    def write(self, blocks: Sequence[tuple[int, int]], payload: bytes) -> None:
        done = 0
        for offset, length in blocks:
            self._file.seek(offset)
            self._file.write(payload[done : done + length])
            done += length

    def read_entry(self, slot: int) -> bytes:
        return self._at(self.geometry.entries_offset + slot * ENTRY_BYTES, ENTRY_BYTES)

    def write_entry(self, slot: int, raw: bytes) -> None:
        self._file.seek(self.geometry.entries_offset + slot * ENTRY_BYTES)
        self._file.write(raw)

    def _at(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(length)
