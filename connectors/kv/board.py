"""What a consumer on the same host must know to copy leased blocks, in memory that it can read: it need not ask.

A question and its answer are six changes of thread, which take longer than to copy some megabytes. So the producer
publishes, beside its cache, the checksums that it takes ahead: a record a lease, with where the blocks are and the
checksum of each grain of them that is known so far. It is found by a digest of the lease's request id and token (the
token itself would let whoever reads the board end the lease), and goes when the lease ends.

Nothing here is locked between the two processes, and nothing needs to be: what a consumer reads while it is written or
taken away fails its checksum, and what it does not find it asks for. The memory is sealed as the cache's is
(`segment.py`), and whoever may read it may read the cache.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from connectors.kv.rows import CHECKSUM_BYTES

#: Leases that have a record, the last ones; and blocks that one can have. Others are asked for.
_MAX_RECORDS = 64
_MAX_BLOCKS = 4096
_NAME_BYTES = 16
_NO_NAME = bytes(_NAME_BYTES)
_NAMES_BYTES = _MAX_RECORDS * _NAME_BYTES
_COUNTS_BYTES = _MAX_RECORDS * 8
_IDS_BYTES = _MAX_RECORDS * _MAX_BLOCKS * 4
BOARD_BYTES = _NAMES_BYTES + _COUNTS_BYTES + _IDS_BYTES + _MAX_RECORDS * _MAX_BLOCKS * CHECKSUM_BYTES


class _Records:
    """The arrays of a board, each by number of the record. The names are together, since they are searched."""

    def __init__(self, memory: Any) -> None:
        counts, ids = _NAMES_BYTES, _NAMES_BYTES + _COUNTS_BYTES
        whole = memoryview(memory)
        self.names = whole[:counts]
        # [_MAX_RECORDS, 2] uint32: blocks of the lease; blocks, from the front, whose grains' checksums are there
        self.counts = np.frombuffer(whole[counts:ids], dtype=np.uint32).reshape(_MAX_RECORDS, 2)
        # [_MAX_RECORDS, _MAX_BLOCKS] uint32, of the producer's cache
        self.block_ids = np.frombuffer(whole[ids : ids + _IDS_BYTES], dtype=np.uint32).reshape(_MAX_RECORDS, -1)
        # One checksum a grain.
        self.checksums = [
            whole[begin : begin + _MAX_BLOCKS * CHECKSUM_BYTES]
            for begin in range(ids + _IDS_BYTES, BOARD_BYTES, _MAX_BLOCKS * CHECKSUM_BYTES)
        ]


class Published(NamedTuple):
    """Blocks of a lease: where they are, and the checksum of each grain of them, end to end."""

    block_ids: list[int]
    checksums: bytes


class ChecksumBoard:
    """The producer's end, in `memory`, of BOARD_BYTES and all zero. Any thread."""

    def __init__(self, memory: Any) -> None:
        self._records = _Records(memory)
        self._lock = threading.Lock()
        self._free = list(range(_MAX_RECORDS))
        self._taken: OrderedDict[str, int] = OrderedDict()  # token -> record, the oldest first

    def open(self, request_id: str, token: str, block_ids: list[int]) -> None:
        """Begin a lease's record, in the oldest one's place if there is no other. Nothing for what is too long."""
        if len(block_ids) > _MAX_BLOCKS:
            return
        with self._lock:
            index = self._free.pop() if self._free else self._taken.popitem(last=False)[1]
            self._taken[token] = index
            self._name(index, _NO_NAME)
            self._records.counts[index] = len(block_ids), 0
            self._records.block_ids[index, : len(block_ids)] = block_ids
            self._name(index, _name_of(request_id, token))  # last: who finds it finds all of it

    def add(self, token: str, grain: int, checksum: bytes, num_summed: int) -> None:
        """The checksum of the record's grain of that number, after which so many blocks are done."""
        with self._lock:
            index = self._taken.get(token)
            if index is not None:
                begin = grain * CHECKSUM_BYTES
                self._records.checksums[index][begin : begin + CHECKSUM_BYTES] = checksum
                self._records.counts[index, 1] = num_summed

    def holds(self, token: str, end: int) -> bool:
        """Whether a consumer could have read the lease's blocks up to `end` here."""
        with self._lock:
            index = self._taken.get(token)
            return index is not None and int(self._records.counts[index, 1]) >= end

    def withdraw(self, token: str) -> None:
        """The lease has ended."""
        with self._lock:
            index = self._taken.pop(token, None)
            if index is not None:
                self._name(index, _NO_NAME)
                self._free.append(index)

    def _name(self, index: int, name: bytes) -> None:
        self._records.names[index * _NAME_BYTES : (index + 1) * _NAME_BYTES] = name


class MappedBoard:
    """The consumer's end; `memory` may change at any time."""

    def __init__(self, memory: Any) -> None:
        self._records = _Records(memory)

    def find(self, request_id: str, token: str, first: int, count: int, grain: int) -> Published | None:
        """Blocks [first, first + count) of a lease, if they are published in whole grains, of `grain` blocks each."""
        records, name = self._records, _name_of(request_id, token)
        begin = bytes(records.names).find(name)
        index, end = begin // _NAME_BYTES, first + count
        if begin < 0 or begin % _NAME_BYTES or first % grain or end > _MAX_BLOCKS:
            return None
        num_blocks, num_summed = records.counts[index].tolist()
        # The last grain of a lease may be shorter; that of a part of a lease is not the one that was summed up.
        if end > num_summed or (end % grain and end != num_blocks):
            return None
        block_ids = records.block_ids[index, first:end].tolist()
        checksums = bytes(records.checksums[index][first // grain * CHECKSUM_BYTES : -(-end // grain) * CHECKSUM_BYTES])
        return Published(block_ids, checksums) if records.names[begin : begin + _NAME_BYTES] == name else None


def _name_of(request_id: str, token: str) -> bytes:
    return hashlib.blake2b(f"{token} {request_id}".encode(), digest_size=_NAME_BYTES).digest()
