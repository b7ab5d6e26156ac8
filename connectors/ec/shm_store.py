"""The items of one namespace in a shared-memory arena: found, copied and checked, written and published.

    read    find and pin under the mutex ▶ copy and check chunk by chunk, without it ▶ unpin
    write   take a slot and blocks under the mutex ▶ copy and sum up, without it ▶ publish under the mutex ▶ unpin

The bytes are copied once, between the arena and the encoder buffer; the checksum is taken of each chunk while it is in
the core's cache. An arena that was removed, replaced, cut short or scribbled over is let go of, and attached to anew:
its items are missing then, nothing worse.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash

from connectors.ec.shm_arena import Arena, ArenaLostError
from connectors.ec.shm_attach import attach_arena
from connectors.ec.shm_index import NeedsGrowthError
from connectors.ec.shm_layout import DTYPE_CODES, Entry, ItemName, uptime_s
from connectors.ec.store import ECStore, ItemError, LoadTarget, SaveSource, StoreError
from core.errors import ConfigError

log = logging.getLogger(__name__)

#: What is copied and summed up at a time, and how much of the arena is used between two looks at its file. Less makes a
#: copy slower: up to the size of a core's own cache the C library copies in a way that wants both sides aligned alike.
_CHUNK_BYTES = 2 << 20
#: How often the upkeep puts the tables in order; it looks for what is too old more often where `ttl_s` is short.
_SWEEP_S = 30.0
_SHORTEST_SWEEP_S = 0.1
#: For the loads and saves under way to end, when the arena is let go of.
_DETACH_S = 0.8
#: A save whose arena is lost under it tries again in the next one, so often.
_WRITE_ATTEMPTS = 3


class SharedMemoryStore(ECStore):
    """Opens the arena when it is needed and again when it was lost.

    `capacity_bytes`: None for what is there or suits. `ttl_s`: age from which the items written here are gone; None for
    no limit. `creates`: whether an arena that is not there is made; else it holds nothing until somebody makes it.
    """

    def __init__(
        self, path: Path, namespace: str, *, capacity_bytes: int | None, ttl_s: float | None, creates: bool
    ) -> None:
        self._path = path
        self._namespace = bytes.fromhex(namespace)
        self._capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._creates = creates
        self._arena: Arena | None = None
        self._closed = False
        self._attaching = threading.Lock()
        self._counting = threading.Lock()
        self._num_evictions = 0

    def open(self) -> None:
        """Attach now rather than at the first use. Raises ConfigError, StoreError, OSError."""
        with self._attaching:
            self._renew()

    def contains(self, keys: Sequence[str]) -> list[bool]:
        now_s = uptime_s()
        with self._attached() as arena:
            if arena is None:
                return [False] * len(keys)
            slots = [arena.index.find(self._name(key), now_s) for key in keys]
            for slot in slots:
                if slot is not None:  # somebody is about to load it
                    arena.index.expect_use(slot)
            return [slot is not None for slot in slots]

    def read(self, key: str, target: LoadTarget) -> None:
        """A damaged item is removed: while it can be seen, nobody makes it again."""
        with self._attached() as arena:
            found = arena and self._pin(arena, self._name(key))
            if not arena or not found:
                raise ItemError("item is not in the store")
            slot, entry = found
            try:
                if entry.dtype_code != DTYPE_CODES[target.dtype]:
                    raise ItemError(f"dtype of the item is not {str(target.dtype).removeprefix('torch.')}")
                if (entry.rows, entry.columns) != target.shape:
                    raise ItemError(f"shape of the item is {(entry.rows, entry.columns)}, not {target.shape}")
                if entry.num_bytes != target.num_bytes:
                    raise ItemError("entry of the item contradicts itself", damaged=True)
                _copy_out(arena, slot, entry, target)
            except ItemError as error:
                if error.damaged:
                    self._drop_damaged(arena, slot, entry)
                raise
            finally:
                arena.pins.unpin(slot)

    def write(self, key: str, source: SaveSource) -> None:
        name = self._name(key)
        for attempt in range(_WRITE_ATTEMPTS):
            with self._attached() as arena:
                if arena is None:
                    raise StoreError("there is no arena, and this role does not make one")
                try:
                    if not self._renew_item(arena, name, source):
                        self._write(arena, name, source)
                    return
                except ArenaLostError:
                    if attempt == _WRITE_ATTEMPTS - 1:
                        raise

    def maintain(self, closing: threading.Event) -> None:
        pause_s = _SWEEP_S if self._ttl_s is None else min(_SWEEP_S, max(self._ttl_s / 4, _SHORTEST_SWEEP_S))
        repair_at_s = time.monotonic() + _SWEEP_S
        while not closing.wait(pause_s):
            try:
                with self._attached() as arena:
                    if arena is not None:
                        with arena.locked() as index:
                            if time.monotonic() < repair_at_s:
                                index.sweep(uptime_s())
                            else:
                                index.repair(uptime_s())
                                repair_at_s = time.monotonic() + _SWEEP_S
            except (ItemError, StoreError, OSError) as error:
                log.warning("the upkeep of the encoder cache's arena failed: %s", error)

    def take_counters(self) -> Mapping[str, int]:
        with self._counting:
            evictions, self._num_evictions = self._num_evictions, 0
        return {"evictions": evictions}

    def close(self) -> None:
        with self._attaching:
            self._closed = True
            arena, self._arena = self._arena, None
        if arena is not None:
            arena.detach(_DETACH_S)

    # ---- the arena ----

    @contextlib.contextmanager
    def _attached(self) -> Iterator[Arena | None]:
        """The arena for as long as the block lasts; None where there is none. Raises StoreError, OSError."""
        arena = self._arena
        # Entered first: one without users may be freed by another thread at any moment.
        if arena is not None and not arena.enter():
            arena = None
        if arena is not None and not arena.is_current():
            arena.leave()
            arena = None
        if arena is None:
            try:
                with self._attaching:
                    arena = self._renew()
                    if arena is not None and not arena.enter():
                        raise StoreError("the arena is being closed")
            except ConfigError as error:
                # At the start this stopped the process; now it is a store that does not answer.
                raise StoreError(error.reason) from None
        if arena is None:
            yield None
            return
        try:
            yield arena
        finally:
            arena.leave()

    def _renew(self) -> Arena | None:
        """The arena that the path leads to now. Under `_attaching`."""
        if self._closed:
            raise StoreError("the connector is closed")
        old = self._arena
        if old is not None:
            if old.is_current():
                return old
            log.warning("the encoder cache's arena was removed, replaced or damaged; its items are lost")
            self._arena = None
            try:
                old.remove()
            finally:
                old.detach(0)
        self._arena = attach_arena(self._path, self._capacity_bytes, self._creates, self._count_evictions)
        return self._arena

    def _count_evictions(self, number: int) -> None:
        with self._counting:
            self._num_evictions += number

    # ---- items ----

    def _name(self, key: str) -> ItemName:
        return ItemName(self._namespace, bytes.fromhex(key))

    def _pin(self, arena: Arena, name: ItemName) -> tuple[int, Entry] | None:
        """The item's slot, pinned, and its entry; None where it is not there."""
        with arena.locked() as index:
            slot = index.find(name, uptime_s())
            if slot is None:
                return None
            entry = index.entry(slot)
            if entry is None:
                index.drop(slot)
                raise ItemError("entry of the item is damaged", damaged=True)
            arena.pins.pin(slot)
            index.touch(slot)
        return slot, entry

    def _drop_damaged(self, arena: Arena, slot: int, entry: Entry) -> None:
        with contextlib.suppress(StoreError, ItemError), arena.locked() as index:
            if index.holds(slot, entry):  # and not somebody else's good one by now
                index.drop(slot)

    def _renew_item(self, arena: Arena, name: ItemName, source: SaveSource) -> bool:
        """Whether the item is there already, whole; then it is as new. A save of what is there is rare, and likely one
        because a reader found it damaged: so look inside."""
        try:
            found = self._pin(arena, name)
        except ArenaLostError:
            raise
        except ItemError:
            return False
        if found is None:
            return False
        slot, entry = found
        try:
            if (entry.dtype_code, entry.rows, entry.columns) != _form(source.embeds):
                return False
            if _checksum(arena, slot, entry) != entry.checksum:
                self._drop_damaged(arena, slot, entry)
                return False
            with arena.locked() as index:
                if not index.holds(slot, entry):
                    return False
                index.touch(slot, self._expires_s())
            return True
        except ArenaLostError:
            raise
        except ItemError:
            self._drop_damaged(arena, slot, entry)
            return False
        finally:
            arena.pins.unpin(slot)

    def _write(self, arena: Arena, name: ItemName, source: SaveSource) -> None:
        slot, entry = self._take(arena, name, source)
        try:
            entry = msgspec.structs.replace(entry, checksum=_copy_in(arena, slot, entry, source))
            with arena.locked() as index:
                source.check()
                index.publish(slot, entry, self._expires_s())
        except BaseException:
            # Where even that fails, the slot stays taken, and is freed by whoever comes by.
            with contextlib.suppress(StoreError, ItemError), arena.locked() as index:
                index.discard(slot)
            raise
        finally:
            arena.pins.unpin(slot)

    def _take(self, arena: Arena, name: ItemName, source: SaveSource) -> tuple[int, Entry]:
        num_bytes = source.embeds.nbytes
        if not num_bytes:
            raise ItemError("an item of no bytes")
        if num_bytes > arena.geometry.capacity_bytes:
            limit = arena.geometry.capacity_bytes
            raise ItemError(f"the item has {num_bytes} bytes, the arena capacity_bytes={limit}")
        dtype_code, rows, columns = _form(source.embeds)
        num_blocks = arena.geometry.num_blocks_for(num_bytes)
        entry = Entry(name, bytes(16), num_bytes, rows, columns, dtype_code, num_blocks, 0)
        may_grow = True
        while True:
            try:
                with arena.locked() as index:
                    return index.take(entry, uptime_s(), may_grow)
            except NeedsGrowthError as error:
                may_grow = arena.grow(error.num_blocks)
            source.check()

    def _expires_s(self) -> float:
        return math.inf if self._ttl_s is None else uptime_s() + self._ttl_s


def _form(embeds: torch.Tensor) -> tuple[int, int, int]:
    """dtype code, rows, columns."""
    return DTYPE_CODES[embeds.dtype], embeds.shape[0], embeds.shape[1]


def _chunks(arena: Arena, slot: int, entry: Entry) -> Iterator[tuple[int, memoryview]]:
    """The item's bytes, the slot being pinned: (offset in the item, a piece of the arena)."""
    done = 0
    for begin, num_bytes in arena.index.extents(slot, entry):
        for offset in range(begin, begin + num_bytes, _CHUNK_BYTES):
            chunk = arena.chunk(offset, min(_CHUNK_BYTES, begin + num_bytes - offset))
            yield done, chunk
            done += chunk.nbytes


def _copy_out(arena: Arena, slot: int, entry: Entry, target: LoadTarget) -> None:
    checksum = xxhash.xxh3_128()
    for offset, chunk in _chunks(arena, slot, entry):
        checksum.update(chunk)
        target.fill(offset, chunk.nbytes, partial(_copy, source=chunk))
    if checksum.digest() != entry.checksum:
        raise ItemError("checksum of the item does not match", damaged=True)


def _copy_in(arena: Arena, slot: int, entry: Entry, source: SaveSource) -> bytes:
    checksum = xxhash.xxh3_128()
    data = source.data
    for offset, chunk in _chunks(arena, slot, entry):
        piece = data[offset : offset + chunk.nbytes]
        checksum.update(piece)
        _copy(chunk, piece)
    return bytes(checksum.digest())


def _copy(target: memoryview, source: memoryview) -> None:
    # By numpy, that is by the C library, which is faster here than torch's loop.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _checksum(arena: Arena, slot: int, entry: Entry) -> bytes:
    checksum = xxhash.xxh3_128()
    for _, chunk in _chunks(arena, slot, entry):
        checksum.update(chunk)
    return bytes(checksum.digest())
