"""The consumer's end of one connection to one producer: handshake, pieces in a window, checksums, acknowledgements.

No thread of its own: `Puller`'s calls it. A connection that breaks, falls silent or talks nonsense says so with
BrokenError; the puller takes its transfers and goes on with what is missing of them over a new one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import zmq

from connectors.kv.base import SAME_HOST, KVLayout
from connectors.kv.rows import BlockRows, Bytes
from connectors.kv.segment import MappedSegment, SameHost, UnreachableError, host_identity
from connectors.kv.transfer import NETWORK, Piece, Transfer
from connectors.kv.wire import (
    MAX_BLOCKS_PER_MESSAGE,
    WIRE_VERSION,
    Ack,
    Failed,
    HandleParams,
    Hello,
    Places,
    Pull,
    Refused,
    Release,
    Renew,
    Rows,
    Welcome,
    check_layout,
    decode_reply,
    encode,
)
from connectors.peer_messages import MAX_HEADER_BYTES, MalformedError
from connectors.zmq_link import BrokenError, Link
from core.errors import IncompatibleError

#: Pieces in flight on one connection. Two keep the line busy while one is checked and copied; the rest is slack.
_WINDOW = 4
#: A message is checked and copied in one go, while nothing else is received, and over the network both ends work on
#: different ones at once: so a pull is cut into eight or more. Small ones cost more than they save, and so do parts of
#: large pulls that are larger than what a processor's cache holds of them.
_MIN_MESSAGE_BYTES = 1 << 20
_MAX_MESSAGE_BYTES = 8 << 20
_MIN_PIECES = 8
#: Through shared memory there is nothing to wait for between two parts; other pulls wait for the end of one.
_MAX_MAPPED_BYTES = 32 << 20


class RefusedError(Exception):
    """The producer and we do not fit: no other connection would do better. Holds the reason."""


class SilentError(BrokenError):
    """The producer has said nothing for too long."""


class Connection:
    """`ended(transfer, reason)` is called once for each transfer that is not taken back by `detach`, with None where
    all of it arrived. Methods may raise BrokenError or RefusedError; `detach` and `close` are all that may be called
    then."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        layout: KVLayout,
        rows: BlockRows,
        blocks_per_message: int,
        timeout_s: float,
        same_host: SameHost,
        ended: Callable[[Transfer, str | None], None],
    ) -> None:
        self.address = address
        self._layout = layout
        self._rows = rows
        row_bytes, most = max(1, rows.row_bytes), min(blocks_per_message, MAX_BLOCKS_PER_MESSAGE)
        most_mapped = max(1, min(most, _MAX_MAPPED_BYTES // row_bytes))
        self._most_mapped = most_mapped // rows.grain * rows.grain or most_mapped  # whole grains, as they are published
        self._most_blocks = max(1, min(most, _MAX_MESSAGE_BYTES // row_bytes))
        self._least_blocks = max(1, min(most, _MIN_MESSAGE_BYTES // row_bytes))
        self._timeout_s = timeout_s
        self._same_host = same_host
        self._ended = ended
        self._welcomed = False
        self._transfers: dict[str, Transfer] = {}  # the oldest first
        self._in_flight: dict[int, tuple[Piece, Transfer]] = {}  # by sequence, the oldest first
        self._sequences = itertools.count()
        self._segment: MappedSegment | None = None
        self._segment_problems: dict[str, str] = {}  # name -> why it could not be mapped
        self.last_progress_s = time.monotonic()
        self.link = Link(
            context,
            address,
            connect_timeout_s=timeout_s,
            max_frame_bytes=max(MAX_HEADER_BYTES, self._most_blocks * row_bytes),
            max_queued=2 * _WINDOW,
        )
        try:
            self.link.send(encode(Hello(WIRE_VERSION, layout)))
        except BrokenError:
            self.link.close()
            raise

    @property
    def idle(self) -> bool:
        return not self._transfers

    @property
    def deadline_s(self) -> float | None:
        """When, on the monotonic clock, the peer must have said something. None where nothing is awaited."""
        return None if self.idle else self.last_progress_s + self._timeout_s / 2

    def add(self, transfer: Transfer) -> None:
        """Begin to pull, or go on, behind what is there already."""
        problem = self._choose_road(transfer)
        if self.idle:
            self.last_progress_s = time.monotonic()
        self._transfers[transfer.request_id] = transfer
        if problem:
            self._end(transfer, problem)
        self._pump()

    def cancel(self, transfer: Transfer) -> None:
        """The blocks are not wanted any more: nothing is written to them from here on, and the producer may free
        its own."""
        self._end(transfer, "cancelled")
        self._pump()

    def renew(self, params: HandleParams) -> None:
        """Say that a lease is wanted still."""
        if self.idle:
            self.last_progress_s = time.monotonic()  # a connection in use is not closed for idleness
        self.link.send(encode(Renew(params.request_id, params.token)))

    def release(self, params: HandleParams) -> None:
        """Say that a lease is not wanted any more whose pull was not begun."""
        self.link.send(encode(Release(params.request_id, params.token)))

    def receive(self) -> None:
        """Take in what has arrived."""
        for _ in range(2 * _WINDOW):
            message = self.link.receive()
            if message is None:
                return
            self.last_progress_s = time.monotonic()
            header, *frames = message
            try:
                reply = decode_reply(header.buffer)
            except MalformedError as error:
                reason = f"{self.address} does not speak our protocol: {error}"
                raise BrokenError(reason, was_up=True) from None
            if isinstance(reply, Welcome):
                self._take_welcome(reply)
            elif isinstance(reply, Refused):
                raise RefusedError(f"{self.address} refused: {reply.reason}")
            else:
                self._take_answer(reply, frames)
            self._pump()

    def check_time(self, now_s: float) -> None:
        """Raise if the peer has been silent for too long; ask again for what was passed over."""
        deadline_s = self.deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            raise SilentError(f"{self.address} fell silent")
        lost = [n for n, (piece, _) in self._in_flight.items() if now_s >= piece.asked_s + self._timeout_s]
        for sequence in lost:
            self._lose(sequence)
        if lost:
            self._pump()

    def detach(self) -> list[Transfer]:
        """Give all transfers back, the oldest first, their missing pieces as they are; nothing more is sent."""
        # Backwards, since each goes to the front of its transfer's.
        for piece, transfer in reversed(self._in_flight.values()):
            transfer.missing.appendleft(piece)
        transfers = list(self._transfers.values())
        self._in_flight.clear()
        self._transfers.clear()
        return transfers

    def close(self) -> None:
        self.link.close()

    def _choose_road(self, transfer: Transfer) -> str:
        """Map the producer's memory where that may be and can be. Returns why the transfer must fail."""
        params = transfer.params
        transfer.road = NETWORK
        if self._same_host is SameHost.NEVER:
            return ""
        if not params.segment:
            problem = "the producer's cache is not in shared memory"
        elif params.segment in self._segment_problems:
            problem = self._segment_problems[params.segment]
        else:
            try:
                if self._segment is None or self._segment.name != params.segment:
                    self._segment = MappedSegment(params.segment, params.instance, self._rows.row_bytes)
                transfer.road = SAME_HOST
                return ""
            except UnreachableError as error:
                problem = self._segment_problems[params.segment] = str(error)
        if self._same_host is SameHost.ALWAYS:
            return f"{problem}; the producer is on {params.host}, we are on {host_identity()}"
        return ""

    def _take_welcome(self, welcome: Welcome) -> None:
        try:
            check_layout(welcome.version, self._layout, welcome.layout)
        except IncompatibleError as error:
            raise RefusedError(f"{self.address} does not fit: {error}") from None
        self._welcomed = True

    def _take_answer(self, answer: Rows | Places | Failed, frames: list[zmq.Frame]) -> None:
        asked = self._in_flight.pop(answer.sequence, None)
        if asked is None:
            return  # cancelled or given up for lost since, and asked for again
        piece, transfer = asked
        if transfer.over:
            return
        # A producer answers the pulls of one lease in their order.
        for sequence in [n for n, (_, other) in self._in_flight.items() if other is transfer and n < answer.sequence]:
            self._lose(sequence)
        if transfer.request_id not in self._transfers:
            return
        if isinstance(answer, Failed):
            transfer.given_up = answer.given_up
            self._end(transfer, f"{self.address}: {answer.reason}")
            return
        if isinstance(answer, Places):
            problem = self._copy_rows(piece, transfer, answer.block_ids, answer.checksums)
        else:
            problem = self._take_rows(piece, transfer, answer.checksums, frames)
        if problem:
            problem = f"{self.address}: {problem}"
            if not transfer.again(piece, problem):
                self._end(transfer, problem)
            return
        transfer.received(piece)
        if transfer.is_complete:
            self._end(transfer, None)

    def _take_rows(self, piece: Piece, transfer: Transfer, checksums: bytes, frames: list[zmq.Frame]) -> str:
        """Copy a message's blocks to where they belong, unless they are not what was sent; the reason then."""
        rows: list[Bytes] = []
        for frame in frames:
            if len(frame) == 0 or len(frame) % self._rows.row_bytes:
                return f"a frame of {len(frame)} bytes holds no whole number of blocks"
            rows.append(np.frombuffer(frame.buffer, dtype=np.uint8).reshape(-1, self._rows.row_bytes))
        num_rows = sum(map(len, rows))
        if num_rows != piece.count:
            return f"{num_rows} blocks came for {piece.count}"
        ours = transfer.block_ids[piece.first : piece.first + piece.count]
        return "" if self._rows.scatter(ours, rows, checksums) else _mismatch(piece)

    def _copy_rows(self, piece: Piece, transfer: Transfer, theirs: list[int], checksums: bytes) -> str:
        """Copy a piece's blocks out of the producer's memory; the reason where what was copied is not what it meant,
        which happens when the lease has ended and other requests use the blocks."""
        if self._segment is None:
            return "places came, and no memory is mapped"
        if len(theirs) != piece.count or max(theirs) >= len(self._segment.rows):
            return f"{len(theirs)} places came for {piece.count} blocks of {len(self._segment.rows)} in memory"
        ours = transfer.block_ids[piece.first : piece.first + piece.count]
        is_whole = self._rows.copy_from(ours, self._segment.rows, theirs, checksums)
        return "" if is_whole else _mismatch(piece)

    def _copy_published(self, piece: Piece, transfer: Transfer) -> bool:
        """Copy a piece's blocks if the producer has published where they are. False where it must be asked, as it is
        for what was published and did not match."""
        if transfer.road != SAME_HOST or piece.tries or self._segment is None:
            return False
        params = transfer.params
        published = self._segment.board.find(
            params.request_id, params.token, piece.first, piece.count, self._rows.grain
        )
        if published is None:
            return False
        problem = self._copy_rows(piece, transfer, published.block_ids, published.checksums)
        self.last_progress_s = time.monotonic()
        if problem:
            transfer.again(piece, f"{self.address}: {problem}")
        else:
            transfer.received(piece)
        return True

    def _lose(self, sequence: int) -> None:
        piece, transfer = self._in_flight.pop(sequence)
        problem = f"an answer of {self.address} was lost"
        if not transfer.over and not transfer.again(piece, problem):
            self._end(transfer, problem)

    def _pump(self) -> None:
        """Keep the window full, the oldest transfer first."""
        if not self._welcomed:
            return
        for transfer in list(self._transfers.values()):
            while len(self._in_flight) < _WINDOW and transfer.missing:
                piece = transfer.next_piece(self._blocks_per_message(transfer))
                if self._copy_published(piece, transfer):
                    continue
                params, sequence = transfer.params, next(self._sequences)
                # First, so that a send which fails leaves the piece where `detach` finds it.
                self._in_flight[sequence] = (piece, transfer)
                piece.asked_s = time.monotonic()
                mapped = transfer.road == SAME_HOST
                self.link.send(
                    encode(Pull(sequence, params.request_id, params.token, piece.first, piece.count, mapped))
                )
            if transfer.is_complete:
                self._end(transfer, None)

    def _blocks_per_message(self, transfer: Transfer) -> int:
        if transfer.road == SAME_HOST:
            return self._most_mapped
        return min(max(self._least_blocks, len(transfer.block_ids) // _MIN_PIECES), self._most_blocks)

    def _end(self, transfer: Transfer, reason: str | None) -> None:
        if transfer.over:
            return
        transfer.over = True
        del self._transfers[transfer.request_id]
        params = transfer.params
        self._ended(transfer, reason)
        # A failed pull releases too: the consumer computes for itself then, and the producer's blocks have no other
        # use.
        kind = Ack if reason is None else Release
        self.link.send(encode(kind(params.request_id, params.token)))


def _mismatch(piece: Piece) -> str:
    return f"the checksum of blocks {piece.first} to {piece.first + piece.count} does not match"
