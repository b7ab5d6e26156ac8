"""The checksums of leased blocks, taken before anybody asks for the blocks.

Leased blocks do not change, so they are summed up as soon as the lease is there and nothing else is to be done: when
the consumer asks, which is mostly some milliseconds later, the checksums are known; one on the same host finds them on
the board and need not ask. Each is used once: what is asked for again is summed up again, so that a consumer is never
refused for good what changed after all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

import numpy as np

from connectors.kv.base import KVLease
from connectors.kv.board import ChecksumBoard
from connectors.kv.leases import LeaseTable, NoLease
from connectors.kv.rows import BlockRows, Bytes, checksum_of, grains_of
from connectors.kv.wire import Pull

#: So much is summed up ahead between two looks for messages, and of so many leases, the last ones, is it known.
_AHEAD_BYTES = 4 << 20
_MAX_AHEAD = 64


class LeasedChecksums:
    """One for each grain; also on `board`, if there is one. The serving thread only, but for `expect`."""

    def __init__(self, rows: BlockRows, leases: LeaseTable, board: ChecksumBoard | None) -> None:
        self._rows = rows
        self._leases = leases
        self._board = board
        if board is not None:
            leases.watch(board.withdraw)
        self._expected: deque[KVLease] = deque()  # append and popleft are atomic
        self._next = 0  # of the first one expected: the first block whose checksum is not known
        self._known: OrderedDict[str, dict[tuple[int, int], bytes]] = OrderedDict()  # by token, then (first, count)
        self._scratch: Bytes = np.empty(0, dtype=np.uint8)  # of a grain's size, once there was one of short rows

    def expect(self, leases: Iterable[KVLease]) -> None:
        """These will be asked for. Any thread."""
        if self._rows.on_host:  # else the blocks would have to be brought here twice
            self._expected.extend(leases)

    @property
    def is_behind(self) -> bool:
        """Whether there are more to take ahead."""
        return bool(self._expected)

    def work_ahead(self) -> None:
        """Take some."""
        num_left = max(1, _AHEAD_BYTES // max(1, self._rows.row_bytes))
        while self._expected and num_left > 0:
            lease = self._expected[0]
            block_ids = lease.block_ids[self._next : self._next + self._rows.grain]
            if not block_ids or self._has_ended(lease):
                self._expected.popleft()
                self._next = 0
                continue
            known = self._known.setdefault(lease.token, {})
            if len(self._known) > _MAX_AHEAD:
                self._known.popitem(last=False)
            # Short rows are brought together first. A call for each would let go of the interpreter's lock for an
            # instant, again and again; who waits for it would be woken each time, and come too late.
            rows = self._rows.gather(block_ids, self._scratch_of)
            checksum = known[self._next, len(block_ids)] = checksum_of(rows)
            if self._board is not None:
                self._publish(self._board, lease, checksum, self._next + len(block_ids))
            self._next += len(block_ids)
            num_left -= len(block_ids)

    def take(self, pull: Pull, arrays: list[Bytes]) -> bytes:
        """Those of a pull, whose rows are in `arrays`. What is asked for again is summed up again."""
        known = self._known.get(pull.token, {})
        if pull.mapped and self._board is not None and self._board.holds(pull.token, pull.first + pull.count):
            known = {}  # it has tried these already
        checksums: list[bytes] = []
        first, end = pull.first, pull.first + pull.count
        for grain in grains_of(arrays, self._rows.grain):
            count = min(self._rows.grain, end - first)
            checksums.append(known.pop((first, count), b"") or checksum_of(grain))
            first += count
        return b"".join(checksums)

    def forget(self, token: str) -> None:
        """The lease has ended."""
        self._known.pop(token, None)

    def _scratch_of(self, num_bytes: int) -> Bytes:
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._scratch

    def _has_ended(self, lease: KVLease) -> bool:
        return isinstance(self._leases.find(lease.request_id, lease.token), NoLease)

    def _publish(self, board: ChecksumBoard, lease: KVLease, checksum: bytes, num_summed: int) -> None:
        if self._next == 0:
            board.open(lease.request_id, lease.token, lease.block_ids)
            if self._has_ended(lease):  # meanwhile: then nobody else takes it away
                board.withdraw(lease.token)
        board.add(lease.token, self._next // self._rows.grain, checksum, num_summed)
