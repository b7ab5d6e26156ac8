"""Which items an arena holds and which blocks are theirs; tables in the arena itself, which all processes change.

A slot is FREE, TAKEN or READY. TAKEN lasts as long as somebody alive has the slot pinned: its writer, or, once an item
has been dropped, the readers that it still has. A slot that is TAKEN and not pinned is what a dead process left, and
whoever comes by frees it. Every change is ordered so that it may stop anywhere:

    take      state TAKEN, then tag, entry and owners
    publish   the checksum, then state READY
    free      state TAKEN, owners to 0, then state FREE

So a process that dies with the mutex in its hand leaves nothing worse than a TAKEN slot. The owners of the blocks are
the only account of what is free, so nothing can get out of step with it. An item's blocks are looked up by a search of
the whole table, which is why there are at most 131,072 blocks.

Other processes may have scribbled here. What is read is used as an index only after a check, and an item whose entry or
blocks do not agree is damaged: it is dropped, and never becomes a wrong tensor, for the payload has a checksum as well.

All methods under the arena's mutex, unless they say otherwise.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.ec.shm_layout import (
    CLOCK_OFFSET,
    COMMITTED_OFFSET,
    ENTRY_BYTES,
    ENTRY_PLACE_OFFSET,
    WINDOW,
    Entry,
    Geometry,
    ItemName,
    pack_entry,
    parse_entry,
)
from connectors.ec.shm_locks import Pins
from connectors.ec.shm_runs import choose, runs_of
from connectors.ec.store import ItemError

_PLACE = struct.Struct("<II")  # Entry.num_blocks, Entry.first_block
#: The part of the arena that may be freed ahead of need: a sixty-fourth.
_SPARE = 64
#: Slots that are freed one by one rather than by a search of all blocks; looked at first when room is needed.
_FEW = 16
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_ALL_ONES = (1 << 64) - 1
_CLOCK_MASK = (1 << 62) - 1
#: States of a slot. Plain numbers: an enum costs more than what is done with it here.
FREE, TAKEN, READY = 0, 1, 2
_FREE_OR_READY = bytes((FREE, READY))


class NeedsGrowthError(Exception):
    """There would be room if more of the arena were committed."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.num_blocks = num_blocks


class Index:
    """The tables of one mapped arena. `on_evict` is told how many items were removed for room or age."""

    def __init__(
        self, memory: mmap.mmap, geometry: Geometry, arena_id: bytes, pins: Pins, on_evict: Callable[[int], None]
    ) -> None:
        self._on_evict = on_evict
        self._geometry = geometry
        self._arena_id = arena_id
        self._pins = pins
        self._memory = memory
        self._data_offset = geometry.data_offset  # properties of a geometry are computed each time
        self._entries_offset = geometry.entries_offset
        self._tags_offset = geometry.tags_offset
        self._owners_offset = geometry.owners_offset
        slots = geometry.num_slots
        self._tags: NDArray[np.uint64] = np.frombuffer(memory, "<u8", slots, geometry.tags_offset)
        self._used_at: NDArray[np.uint64] = np.frombuffer(memory, "<u8", slots, geometry.used_at_offset)
        self._expires_s: NDArray[np.float64] = np.frombuffer(memory, "<f8", slots, geometry.expires_offset)
        self._states: NDArray[np.uint8] = np.frombuffer(memory, "u1", slots, geometry.states_offset)
        entries = np.frombuffer(memory, "u1", slots * ENTRY_BYTES, geometry.entries_offset)
        self._entries: NDArray[np.uint8] = entries.reshape(slots, ENTRY_BYTES)
        self._owners: NDArray[np.uint32] = np.frombuffer(memory, "<u4", geometry.num_blocks, geometry.owners_offset)

    # ---- looking ----

    def find(self, name: ItemName, now_s: float) -> int | None:
        """The slot where the item is READY and not too old. Without the mutex the answer is a hint."""
        for slot in self._candidates(name):
            if self._states[slot] == READY and now_s < self._expires_s[slot] and self._is_named(slot, name):
                return slot
        return None

    def entry(self, slot: int) -> Entry | None:
        """None where it is damaged."""
        return parse_entry(self._raw_entry(slot), self._arena_id, slot)

    def holds(self, slot: int, entry: Entry) -> bool:
        """Whether `slot` is READY with exactly this item still."""
        return bool(self._states[slot] == READY) and self.entry(slot) == entry

    def extents(self, slot: int, entry: Entry) -> list[tuple[int, int]]:
        """Where the item's bytes are: (offset in the file, number of bytes), in order. Needs no mutex while the slot is
        pinned. Raises ItemError where blocks and entry do not agree."""
        run = self._run_of(slot)
        if run == slice(entry.first_block, entry.first_block + entry.num_blocks):
            runs = [(entry.first_block, entry.num_blocks)]
        else:
            blocks = np.flatnonzero(self._owners == slot + 1)
            if len(blocks) != entry.num_blocks:
                raise ItemError("blocks of the item do not agree with its entry", damaged=True)
            runs = list(runs_of(blocks))
        if entry.num_blocks != self._geometry.num_blocks_for(entry.num_bytes):
            raise ItemError("size of the item does not agree with its blocks", damaged=True)
        block_bytes, left, extents = self._geometry.block_bytes, entry.num_bytes, []
        for block, num_blocks in runs:
            num_bytes = min(num_blocks * block_bytes, left)
            extents.append((self._data_offset + block * block_bytes, num_bytes))
            left -= num_bytes
        return extents

    def num_committed(self) -> int:
        """Blocks that the file system has given us: the first so many. Needs no mutex."""
        value, complement = struct.unpack_from("<QQ", self._memory, COMMITTED_OFFSET)
        if value ^ complement != _ALL_ONES or value > self._geometry.num_blocks:
            return 0  # to commit a block again does it no harm
        return int(value)

    def num_items(self) -> int:
        """READY ones, of all namespaces. Needs no mutex."""
        return int((self._states == READY).sum())

    # ---- changing ----

    def set_committed(self, num_blocks: int) -> None:
        """Never less than before."""
        value = max(num_blocks, self.num_committed())
        struct.pack_into("<QQ", self._memory, COMMITTED_OFFSET, value, value ^ _ALL_ONES)

    def touch(self, slot: int, expires_s: float | None = None) -> None:
        """The item has been used, or, with `expires_s`, saved once more."""
        self._used_at[slot] = self._tick()
        if expires_s is not None:
            self._expires_s[slot] = expires_s

    def expect_use(self, slot: int) -> None:
        """Somebody asked for the item. Needs no mutex: where another item has the slot by now, it stays a little longer
        than it would have."""
        self._used_at[slot] = _U64.unpack_from(self._memory, CLOCK_OFFSET)[0] & _CLOCK_MASK

    def take(self, entry: Entry, now_s: float, may_grow: bool) -> tuple[int, Entry]:
        """A slot and blocks for an item that is to be written: the slot, pinned once, and the entry with its place.

        Removes what is too old, then what dead processes left, then what was used longest ago; nothing that is pinned.
        Raises NeedsGrowthError, if `may_grow`, before anything else is removed than the first two; ItemError where
        what is in use leaves no room.
        """
        blocks = self._room_for(entry.num_blocks, now_s, may_grow)
        slot = self._slot_for(entry.name)
        placed = msgspec.structs.replace(entry, first_block=int(blocks[0]))
        self._pins.pin(slot)
        self._states[slot] = TAKEN
        self._tags[slot] = entry.name.tag
        self._write_entry(slot, placed)
        self._owners[blocks] = slot + 1
        return slot, placed

    def publish(self, slot: int, entry: Entry, expires_s: float) -> None:
        """Make the item that was written into `slot` visible, in the place of one of the same name."""
        self._write_entry(slot, entry)
        self.touch(slot, expires_s)
        self._states[slot] = READY
        for other in self._candidates(entry.name):
            if other != slot and self._states[other] == READY and self._is_named(other, entry.name):
                self.drop(other)

    def drop(self, slot: int) -> None:
        """Make the slot's item invisible at once, and free its blocks once nobody has it pinned. Of a slot that the
        caller has pinned and will let go of, the blocks stay until somebody comes by."""
        self._states[slot] = TAKEN
        if not self._pins.is_pinned(slot):
            self._free([slot])

    def discard(self, slot: int) -> None:
        """Take back a slot that `take` gave; the caller unpins it afterwards. Where its item was published, readers may
        have it pinned as well, so its blocks stay until somebody comes by."""
        if self._states[slot] == READY:
            self._states[slot] = TAKEN
        else:
            self._free([slot])

    def sweep(self, now_s: float) -> bool:
        """Remove what is too old and what dead processes left. Whether there was anything."""
        ready = self._ready()
        expired = ready[~(now_s < self._expires_s[ready])]
        if len(expired):
            self._states[expired] = TAKEN
            self._on_evict(len(expired))
        freed = []
        if self._states.tobytes().translate(None, _FREE_OR_READY):  # a fraction of what a comparison costs
            freed = list(self._unpinned(np.flatnonzero((self._states != READY) & (self._states != FREE))))
            self._free(freed)
        return bool(freed)

    def repair(self, now_s: float) -> None:
        """Sweep, and make the tables agree with each other, whatever stands in them: items whose blocks are not as many
        as their entry says are dropped, blocks without an item are freed."""
        owners = self._sane_owners()
        counts = np.bincount(owners, minlength=len(self._states) + 1)[1:]
        slots = np.arange(len(self._states))
        wrong = (self._states == READY) & ((counts != self._claims(slots)) | np.isnan(self._expires_s))
        self._states[wrong] = TAKEN
        self.sweep(now_s)
        states = np.concatenate(([FREE], self._states))
        self._owners[states[owners] == FREE] = 0

    # ---- inside ----

    def _candidates(self, name: ItemName) -> list[int]:
        # Bytes rather than an array: for a window, NumPy's calls cost more than the search.
        tag = name.tag
        first = self._window(tag)
        begin = self._tags_offset + 8 * first
        tags = self._memory[begin : begin + 8 * WINDOW]
        wanted = _U64.pack(tag)
        found, at = [], tags.find(wanted)
        while at >= 0:
            if at % 8 == 0:
                found.append(first + at // 8)
            at = tags.find(wanted, at + 1)
        return found

    def _window(self, tag: int) -> int:
        return tag % (self._geometry.num_slots - WINDOW + 1)

    def _raw_entry(self, slot: int) -> bytes:
        begin = self._entries_offset + slot * ENTRY_BYTES
        return self._memory[begin : begin + ENTRY_BYTES]

    def _write_entry(self, slot: int, entry: Entry) -> None:
        begin = self._entries_offset + slot * ENTRY_BYTES
        self._memory[begin : begin + ENTRY_BYTES] = pack_entry(entry, self._arena_id, slot)

    def _is_named(self, slot: int, name: ItemName) -> bool:
        return self._raw_entry(slot).startswith(name.namespace + name.key)

    def _tick(self) -> int:
        clock = (_U64.unpack_from(self._memory, CLOCK_OFFSET)[0] + 1) & _CLOCK_MASK
        _U64.pack_into(self._memory, CLOCK_OFFSET, clock)
        return int(clock)

    def _free(self, slots: list[int]) -> None:
        self._states[slots] = TAKEN
        if len(slots) <= _FEW:
            for slot in slots:
                run = self._run_of(slot)
                if run is None:
                    self._owners[self._owners == slot + 1] = 0
                else:
                    self._owners[run] = 0
        else:  # a search of the owners takes as long for all as for one
            goes = np.zeros(len(self._states) + 1, np.bool_)
            goes[np.array(slots) + 1] = True
            self._owners[goes[self._sane_owners()]] = 0
        self._states[slots] = FREE

    def _run_of(self, slot: int) -> slice | None:
        """The slot's blocks where its entry says that they are, if they are one stretch; else they are to be searched
        for."""
        first, num_blocks = _PLACE.unpack_from(self._raw_entry(slot), ENTRY_PLACE_OFFSET)[::-1]
        if not 0 < num_blocks <= self._geometry.num_blocks - first:
            return None
        begin = self._owners_offset + _U32.size * first  # bytes, as in `_candidates`
        owners = self._memory[begin : begin + _U32.size * num_blocks]
        return slice(first, first + num_blocks) if owners == _U32.pack(slot + 1) * num_blocks else None

    def _ready(self) -> NDArray[np.intp]:
        return np.flatnonzero(self._states == READY)

    def _sane_owners(self) -> NDArray[np.uint32]:
        """A copy, since a scribbler must not get a number past the check."""
        owners = self._owners.copy()
        owners[owners > self._geometry.num_slots] = 0
        return owners

    def _claims(self, slots: NDArray[np.intp]) -> NDArray[np.uint32]:
        """How many blocks the slots' entries say that they have; not checked."""
        begin = ENTRY_PLACE_OFFSET
        raw = self._entries[slots, begin : begin + 4]  # a copy, [len(slots), 4]
        return raw.view("<u4")[:, 0]

    def _unpinned(self, slots: NDArray[np.intp]) -> Iterator[int]:
        any_pins = self._pins.are_any(self._geometry.num_slots)
        for slot in slots.tolist():
            if not any_pins or not self._pins.is_pinned(slot):
                yield slot

    def _free_blocks(self) -> NDArray[np.intp]:
        return np.flatnonzero(self._owners[: self.num_committed()] == 0)

    def _room_for(self, num_blocks: int, now_s: float, may_grow: bool) -> NDArray[np.intp]:
        free = self._free_blocks()
        if len(free) < num_blocks and self.sweep(now_s):
            free = self._free_blocks()
        if len(free) < num_blocks:
            committed = self.num_committed()
            if may_grow and committed < self._geometry.num_blocks:
                raise NeedsGrowthError(num_blocks - len(free))
            if num_blocks > committed:
                raise ItemError("the arena cannot grow: its file system is full")
            self._evict(num_blocks - len(free))
            free = self._free_blocks()
        if len(free) < num_blocks:  # or the entries lied about what they hold, which the next repair finds
            raise ItemError("the arena is full of items in use")
        return choose(free, num_blocks)

    def _evict(self, num_blocks: int) -> None:
        """Free at least so many blocks, those used longest ago first; none where that many are not to be had.

        As the search costs more than what it leads to, a little more is freed than is needed: at most _SPARE of the
        arena, and no item that is larger than what is left of that.
        """
        at_most = num_blocks + self._geometry.num_blocks // _SPARE
        victims, room = [], 0
        for slots in self._oldest_first(self._ready()):
            claims = dict(zip(slots.tolist(), self._claims(slots).tolist(), strict=True))
            for slot in self._unpinned(slots):
                if room >= num_blocks and room + claims[slot] > at_most:
                    break
                victims.append(slot)
                room += claims[slot]
            if room >= num_blocks:
                self._free(victims)
                self._on_evict(len(victims))
                return

    def _oldest_first(self, ready: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
        """A few that were used longest ago, then the rest, each in order: the few are mostly enough."""
        used_at = self._used_at[ready]
        if len(ready) > _FEW:
            few = np.argpartition(used_at, _FEW)[:_FEW]
            few = few[np.argsort(used_at[few], kind="stable")]
            yield ready[few]
            used_at[few] = _ALL_ONES
            yield ready[np.argsort(used_at, kind="stable")[: len(ready) - _FEW]]
        else:
            yield ready[np.argsort(used_at, kind="stable")]

    def _slot_for(self, name: ItemName) -> int:
        begin = self._window(name.tag)
        window = np.arange(begin, begin + WINDOW)
        free = window[self._states[window] == FREE]
        if len(free):
            return int(free[0])
        for slot in self._unpinned(window[np.argsort(self._used_at[window], kind="stable")]):
            self._on_evict(int(self._states[slot] == READY))
            self._free([slot])
            return slot
        raise ItemError("the arena's index is full of items in use")
