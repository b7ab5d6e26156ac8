"""What stands where in an arena: one file that every process of a node maps.

    header      4 KiB: magic, version, geometry and their checksum, which never change; clock and committed blocks
    tags        u64 a slot: where to look for an item (xxh3-64 of namespace and key)
    used_at     u64 a slot: the clock when the item was last used
    expires_s   f64 a slot: the machine's uptime from which on it is too old, or infinity
    states      u8  a slot: FREE, TAKEN or READY
    entries     128 bytes a slot: namespace, key, shape, dtype, checksum of the payload; and a checksum of all that
    owners      u32 a block: 1 + the slot that the block belongs to, or 0
    data        the blocks. An item's bytes fill its blocks in the order of their addresses

All numbers are little endian. Whatever is read from an arena may have been scribbled over: see `shm_index.py`.
"""

from __future__ import annotations

import struct
import time

import msgspec
import torch
import xxhash

MAGIC = b"TRIPTYEC"
VERSION = 2
HEADER_BYTES = 4096
_DATA_ALIGNMENT = 1 << 21
MAX_CAPACITY_BYTES = 1 << 44

#: magic, version, zero, arena id, block_bytes, num_blocks, num_slots; then their xxh3-64.
_STATIC = struct.Struct("<8sII16sQQQ")
STATIC_BYTES = _STATIC.size + 8
#: Only these first bytes mean the same in every version.
PREFIX_BYTES = 12
CLOCK_OFFSET = 128
COMMITTED_OFFSET = 136  # and its complement behind it

_MIN_BLOCK_BYTES = 32 << 10
_MAX_BLOCKS = 1 << 17
#: An item's slot is one of so many behind the place that its tag says.
WINDOW = 32

ENTRY_BYTES = 128
#: namespace, key, xxh3-128 of the payload, num_bytes, rows, columns, dtype, num_blocks, first_block, padding; xxh3-64.
_ENTRY = struct.Struct("<32s32s16sQIIIII4x")
ENTRY_PLACE_OFFSET = 100  # of num_blocks and first_block
_SUM = struct.Struct("<Q")

DTYPE_CODES = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}


def uptime_s() -> float:
    """Seconds since the machine was started, the same for all its processes: wall time may be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeaderError(Exception):
    """A file that is no arena of this version. `version`: the one that it claims, None where it is none at all."""

    def __init__(self, reason: str, version: int | None) -> None:
        super().__init__(reason)
        self.version = version


class Geometry(msgspec.Struct, frozen=True):
    """Sizes of an arena's parts; all offsets follow from them."""

    block_bytes: int
    num_blocks: int
    num_slots: int

    @classmethod
    def for_capacity(cls, capacity_bytes: int) -> Geometry:
        """The largest that holds at most `capacity_bytes` of items. A block is the smallest power of two with which the
        tables stay small enough to be searched whole, from 32 KiB on."""
        block_bytes = _MIN_BLOCK_BYTES
        while capacity_bytes > block_bytes * _MAX_BLOCKS:
            block_bytes *= 2
        num_blocks = capacity_bytes // block_bytes
        return cls(block_bytes, num_blocks, _num_slots(num_blocks))

    @property
    def capacity_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def tags_offset(self) -> int:
        return HEADER_BYTES

    @property
    def used_at_offset(self) -> int:
        return self.tags_offset + 8 * self.num_slots

    @property
    def expires_offset(self) -> int:
        return self.used_at_offset + 8 * self.num_slots

    @property
    def entries_offset(self) -> int:
        return self.expires_offset + 8 * self.num_slots

    @property
    def owners_offset(self) -> int:
        return self.entries_offset + ENTRY_BYTES * self.num_slots

    @property
    def states_offset(self) -> int:
        return self.owners_offset + 4 * self.num_blocks

    @property
    def tables_end(self) -> int:
        return self.states_offset + self.num_slots

    @property
    def data_offset(self) -> int:
        return -(-self.tables_end // _DATA_ALIGNMENT) * _DATA_ALIGNMENT

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.capacity_bytes

    def num_blocks_for(self, num_bytes: int) -> int:
        return -(-num_bytes // self.block_bytes)


def _num_slots(num_blocks: int) -> int:
    return max(num_blocks, 2 * WINDOW)


def pack_header(geometry: Geometry, arena_id: bytes) -> bytes:
    """The STATIC_BYTES at the begin of an arena. `arena_id`: 16 random bytes."""
    static = _STATIC.pack(MAGIC, VERSION, 0, arena_id, geometry.block_bytes, geometry.num_blocks, geometry.num_slots)
    return static + _SUM.pack(xxhash.xxh3_64_intdigest(static))


def parse_header(raw: bytes) -> tuple[Geometry, bytes]:
    """The geometry and the arena's id. Raises HeaderError."""
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        raise HeaderError("it is not an arena", None)
    if len(raw) >= PREFIX_BYTES:
        version = int.from_bytes(raw[8:PREFIX_BYTES], "little")
        if version != VERSION:
            raise HeaderError(f"its format version is {version}, this program's is {VERSION}", version)
    if len(raw) < STATIC_BYTES:
        raise HeaderError("it is cut short", VERSION)
    if _SUM.unpack(raw[_STATIC.size : STATIC_BYTES])[0] != xxhash.xxh3_64_intdigest(raw[: _STATIC.size]):
        raise HeaderError("its header is damaged", VERSION)
    _, _, _, arena_id, block_bytes, num_blocks, num_slots = _STATIC.unpack(raw[: _STATIC.size])
    geometry = Geometry(block_bytes, num_blocks, num_slots)
    if (
        block_bytes % _MIN_BLOCK_BYTES
        or not 0 < num_blocks <= _MAX_BLOCKS
        or num_slots != _num_slots(num_blocks)
        or geometry.capacity_bytes > MAX_CAPACITY_BYTES
    ):
        raise HeaderError("its sizes contradict each other", VERSION)
    return geometry, arena_id


class ItemName(msgspec.Struct, frozen=True):
    """What an item is found by."""

    namespace: bytes  # 32
    key: bytes  # 32

    @property
    def tag(self) -> int:
        return int(xxhash.xxh3_64_intdigest(self.namespace + self.key))


class Entry(msgspec.Struct, frozen=True):
    """What the index knows of an item besides its place."""

    name: ItemName
    checksum: bytes  # 16: XXH3-128 of the payload
    num_bytes: int
    rows: int
    columns: int
    dtype_code: int
    num_blocks: int
    first_block: int


def pack_entry(entry: Entry, arena_id: bytes, slot: int) -> bytes:
    """The ENTRY_BYTES of a slot. Its checksum covers the place too: an entry that was copied elsewhere is damaged."""
    raw = _ENTRY.pack(
        entry.name.namespace,
        entry.name.key,
        entry.checksum,
        entry.num_bytes,
        entry.rows,
        entry.columns,
        entry.dtype_code,
        entry.num_blocks,
        entry.first_block,
    )
    return (raw + _SUM.pack(_entry_sum(raw, arena_id, slot))).ljust(ENTRY_BYTES, b"\0")


def parse_entry(raw: bytes, arena_id: bytes, slot: int) -> Entry | None:
    """None where the entry is damaged."""
    static = raw[: _ENTRY.size]
    if _SUM.unpack(raw[_ENTRY.size : _ENTRY.size + 8])[0] != _entry_sum(static, arena_id, slot):
        return None
    namespace, key, *rest = _ENTRY.unpack(static)
    return Entry(ItemName(namespace, key), *rest)


def _entry_sum(raw: bytes, arena_id: bytes, slot: int) -> int:
    return int(xxhash.xxh3_64_intdigest(raw + arena_id, seed=slot))
