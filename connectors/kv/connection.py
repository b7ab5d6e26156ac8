"""The consumer's end of one connection to one producer: handshake, pieces in a window, checksums, acknowledgements.

No thread of its own: `Puller`'s calls it. A connection that breaks, falls silent or talks nonsense says so with
BrokenError; the puller takes its transfers and goes on with what is missing of them over a new one.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from connectors.connections import BrokenError
from connectors.kv.arrival import Arrival, Waste
from connectors.kv.base import SAME_HOST, KVLayout
from connectors.kv.link import Link
from connectors.kv.rows import BlockRows
from connectors.kv.segment import MappedSegment, SameHost, UnreachableError, host_identity
from connectors.kv.stream import Message
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
from connectors.peer_messages import MalformedError
from core.errors import IncompatibleError

log = logging.getLogger(__name__)

#: Pieces in flight on one connection: the next ones are asked for while one arrives.
_WINDOW = 4
#: A piece is large enough that what is said of it costs nothing, and small enough that its checksums, where they are
#: not known yet, do not keep the line waiting, nor others at the producer from the interpreter's lock.
_MAX_MESSAGE_BYTES = 2 << 20
#: Received in one go, before other connections and orders get their turn.
_MAX_BYTES_AT_A_TIME = 8 << 20
#: Through shared memory there is nothing to wait for between two parts; other pulls wait for the end of one.
_MAX_MAPPED_BYTES = 32 << 20


class RefusedError(Exception):
    """The producer and we do not fit: no other connection would do better. Holds the reason."""


class SilentError(BrokenError):
    """The producer has said nothing for too long."""


class _Arriving:
    """A body of which a part has come, and what it is: None where nobody wants it any more."""

    __slots__ = ("asked", "begun_s", "body")

    def __init__(self, body: Arrival | Waste, asked: tuple[Piece, Transfer] | None = None) -> None:
        self.body: Arrival | Waste = body
        self.asked = asked
        self.begun_s = time.monotonic()


class Connection:
    """`ended(transfer, reason)` is called once for each transfer that is not taken back by `detach`, with None where
    all of it arrived. Methods may raise BrokenError or RefusedError; `detach` and `close` are all that may be called
    then."""

    def __init__(
        self,
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
        self._timeout_s = timeout_s
        self._same_host = same_host
        self._ended = ended
        self._welcomed = False
        self._transfers: dict[str, Transfer] = {}  # the oldest first
        self._in_flight: dict[int, tuple[Piece, Transfer]] = {}  # by sequence, the oldest first
        self._arriving: _Arriving | None = None  # the answer of which a part has come
        self._sequences = itertools.count()
        self._segment: MappedSegment | None = None
        self._segment_problems: dict[str, str] = {}  # name -> why it could not be mapped
        self.last_progress_s = time.monotonic()
        self.link = Link(address, self._most_blocks * row_bytes, timeout_s / 4)
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
        """When, on the monotonic clock, `check_time` must be called. None where nothing is awaited."""
        if self.idle:
            return self.link.deadline_s
        silent_s = self.last_progress_s + self._timeout_s / 2
        return silent_s if self.link.deadline_s is None else min(silent_s, self.link.deadline_s)

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
        if not self.link.is_busy:  # connecting, with many leases: it is said again soon
            self.link.send(encode(Renew(params.request_id, params.token)))

    def release(self, params: HandleParams) -> None:
        """Say that a lease is not wanted any more whose pull was not begun."""
        self.link.send(encode(Release(params.request_id, params.token)))

    def receive(self) -> None:
        """Take in what has arrived."""
        num_left = _MAX_BYTES_AT_A_TIME
        while num_left > 0:
            if self._arriving is None:
                try:
                    message = self.link.receive()
                except MalformedError as error:
                    raise self._nonsense(error) from None
                if message is None:
                    return
                num_left -= len(message.header)
                self._take(message)
            else:
                num_bytes = self.link.receive_into(self._arriving.body.places())
                if not num_bytes:
                    return
                num_left -= num_bytes
                self._arriving.body.received(num_bytes)
                if not self._arriving.body.num_missing:
                    self._take_rows(self._arriving)
            self.last_progress_s = time.monotonic()

    def check_time(self, now_s: float) -> None:
        """Raise if the peer has been silent for too long; ask again for what was passed over."""
        self.link.check_time(now_s)
        if not self.idle and now_s >= self.last_progress_s + self._timeout_s / 2:
            raise SilentError(f"{self.address} fell silent")
        if self._arriving is not None:
            return  # the line is taken
        lost = [n for n, (piece, _) in self._in_flight.items() if now_s >= piece.asked_s + self._timeout_s]
        for sequence in lost:
            self._lose(sequence)
        if lost:
            self._pump()

    def detach(self) -> list[Transfer]:
        """Give all transfers back, the oldest first, their missing pieces as they are; nothing more is sent."""
        asked = list(self._in_flight.values())
        if self._arriving is not None and self._arriving.asked is not None:
            asked.insert(0, self._arriving.asked)
        # Backwards, since each goes to the front of its transfer's.
        for piece, transfer in reversed(asked):
            transfer.missing.appendleft(piece)
        transfers = list(self._transfers.values())
        self._arriving = None
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

    def _take(self, message: Message) -> None:
        try:
            reply = decode_reply(message.header)
        except MalformedError as error:
            raise self._nonsense(error) from None
        if message.body_bytes and not isinstance(reply, Rows):
            raise self._nonsense(f"a body of {message.body_bytes} bytes")
        if isinstance(reply, Welcome):
            self._take_welcome(reply)
        elif isinstance(reply, Refused):
            raise RefusedError(f"{self.address} refused: {reply.reason}")
        else:
            self._take_answer(reply, message.body_bytes)
        self._pump()

    def _nonsense(self, problem: object) -> BrokenError:
        return BrokenError(f"{self.address} does not speak our protocol: {problem}", was_up=True)

    def _take_welcome(self, welcome: Welcome) -> None:
        try:
            check_layout(welcome.version, self._layout, welcome.layout)
        except IncompatibleError as error:
            raise RefusedError(f"{self.address} does not fit: {error}") from None
        self._welcomed = True

    def _take_answer(self, answer: Rows | Places | Failed, body_bytes: int) -> None:
        asked = self._in_flight.pop(answer.sequence, None)
        if asked is not None:
            # A producer answers the pulls of one lease in their order.
            piece, transfer = asked
            passed = [n for n, (_, other) in self._in_flight.items() if other is transfer and n < answer.sequence]
            for sequence in passed:
                self._lose(sequence)
        if asked is None or transfer.over:  # cancelled or given up for lost since, and asked for again
            if body_bytes:
                self._arriving = _Arriving(Waste(body_bytes))
        elif isinstance(answer, Rows):
            if body_bytes != piece.count * self._rows.row_bytes:
                self._in_flight[answer.sequence] = asked
                raise self._nonsense(f"{body_bytes} bytes came for {piece.count} blocks")
            ours = transfer.block_ids[piece.first : piece.first + piece.count]
            self._arriving = _Arriving(self._rows.arrival(ours, answer.checksums), asked)
        elif isinstance(answer, Places):
            self._took(piece, transfer, self._copy_rows(piece, transfer, answer.block_ids, answer.checksums))
        else:
            transfer.given_up = answer.given_up
            self._end(transfer, f"{self.address}: {answer.reason}")

    def _take_rows(self, arrived: _Arriving) -> None:
        """All of a body has come."""
        self._arriving = None
        # For so long the line was taken: no wonder that nothing else came.
        seconds = time.monotonic() - arrived.begun_s
        for piece, _ in self._in_flight.values():
            piece.asked_s += seconds
        if arrived.asked is not None:
            piece, transfer = arrived.asked
            try:
                is_right = arrived.body.end()
            except Exception as error:  # a device's; the other transfers can go on
                log.exception("blocks could not be copied to the device")
                self._end(transfer, f"blocks could not be copied to the device: {error}")
            else:
                self._took(piece, transfer, "" if is_right else _mismatch(piece))
            self._pump()

    def _took(self, piece: Piece, transfer: Transfer, problem: str) -> None:
        """A piece is where it belongs, or there is a problem with it."""
        if problem:
            problem = f"{self.address}: {problem}"
            if not transfer.again(piece, problem):
                self._end(transfer, problem)
            return
        transfer.received(piece)
        if transfer.is_complete:
            self._end(transfer, None)

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
            most = self._most_mapped if transfer.road == SAME_HOST else self._most_blocks
            while len(self._in_flight) < _WINDOW and transfer.missing:
                piece = transfer.next_piece(most)
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

    def _end(self, transfer: Transfer, reason: str | None) -> None:
        if transfer.over:
            return
        transfer.over = True
        del self._transfers[transfer.request_id]
        arriving = self._arriving
        if arriving is not None and arriving.asked is not None and arriving.asked[1] is transfer:
            arriving.body, arriving.asked = Waste(arriving.body.num_missing), None
        params = transfer.params
        self._ended(transfer, reason)
        # A failed pull releases too: the consumer computes for itself then, and the producer's blocks have no other
        # use.
        kind = Ack if reason is None else Release
        self.link.send(encode(kind(params.request_id, params.token)))


def _mismatch(piece: Piece) -> str:
    return f"the checksum of blocks {piece.first} to {piece.first + piece.count} does not match"
