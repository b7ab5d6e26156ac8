"""The checksums of leased blocks, taken before anybody asks for the blocks.

Leased blocks do not change, so they are summed up as soon as the lease is there and nothing else is to be done: when
the consumer asks, which is mostly some milliseconds later, the checksums are known; one on the same host finds them on
the board and need not ask. Each is used once: what is asked for again is summed up again, so that a consumer is never
refused for good what changed after all.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

import numpy as np

from connectors.kv.base import KVLease
from connectors.kv.board import ChecksumBoard
from connectors.kv.leases import LeaseTable, NoLease
from connectors.kv.rows import BlockRows, Bytes, checksum_of, grains_of
from connectors.kv.wire import Pull

log = logging.getLogger(__name__)

#: So much is summed up between two looks for messages, and of so many leases, the last ones, is it known.
_PORTION_BYTES = 2 << 20
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
        self._portion = max(1, _PORTION_BYTES // max(1, rows.row_bytes * rows.grain)) * rows.grain  # blocks
        self._scratch: Bytes = np.empty(0, dtype=np.uint8)  # of a portion's size, once there was one of short rows

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
        while self._expected and self._has_ended(self._expected[0]):
            self._go_on()
        if not self._expected:
            return
        lease = self._expected[0]
        try:
            self._sum_up_some(lease)
        except Exception:  # whatever it is, it is tried again when the blocks are asked for, and told then
            log.exception("the checksums of a lease cannot be taken ahead")
            self._go_on()
        else:
            if self._next == len(lease.block_ids):
                self._go_on()

    def _sum_up_some(self, lease: KVLease) -> None:
        block_ids = lease.block_ids[self._next : self._next + self._portion]
        known = self._known.setdefault(lease.token, {})
        if len(self._known) > _MAX_AHEAD:
            self._known.popitem(last=False)
        for checksum in self._sums(block_ids):
            count = min(self._rows.grain, len(lease.block_ids) - self._next)
            known[self._next, count] = checksum
            if self._board is not None:
                self._publish(self._board, lease, checksum, self._next + count)
            self._next += count

    def take(self, pull: Pull, block_ids: list[int], rows: list[Bytes]) -> bytes:
        """Those of a pull of these blocks, whose bytes are in `rows`. What is asked for again is summed up again."""
        known = self._known.get(pull.token, {})
        if pull.mapped and self._board is not None and self._board.holds(pull.token, pull.first + pull.count):
            known = {}  # it has tried these already
        grain = self._rows.grain
        checksums: list[bytes] = []
        unknown: list[int] = []
        for first in range(0, len(block_ids), grain):
            ids = block_ids[first : first + grain]
            checksums.append(known.pop((pull.first + first, len(ids)), b""))
            unknown += [] if checksums[-1] else ids
        taken = self._sums(unknown) if self._rows.on_host else map(checksum_of, grains_of(rows, grain))
        return b"".join(checksum or next(taken) for checksum in checksums)

    def forget(self, token: str) -> None:
        """The lease has ended."""
        self._known.pop(token, None)

    def _sums(self, block_ids: list[int]) -> Iterator[bytes]:
        """Of each grain of these blocks, which are in host memory."""
        # Short rows are brought together first, as many as there is room for. A call for each would let go of the
        # interpreter's lock for an instant, again and again; who waits for it would be woken each time, and come too
        # late. While two megabytes are copied he gets it.
        for first in range(0, len(block_ids), self._portion):
            rows = self._rows.gather(block_ids[first : first + self._portion], self._scratch_of)
            yield from map(checksum_of, grains_of(rows, self._rows.grain))

    def _go_on(self) -> None:
        """To the next lease."""
        self._expected.popleft()
        self._next = 0

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
