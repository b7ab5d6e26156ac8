"""The consumer's end of one connection to one producer: handshake, pulls in a window, checksums, acknowledgements.

No thread of its own: `Puller`'s calls it. ZeroMQ would reconnect behind our back and lose what was in flight, so that
is switched off: a connection that breaks says so through its monitor, all its transfers fail at once, and the next
pull makes a new connection.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import xxhash
import zmq
from zmq.utils.monitor import recv_monitor_message

from connectors.kv.base import KVLayout, KVPull
from connectors.kv.rows import BlockRows, Bytes
from connectors.kv.wire import (
    MAX_HEADER_BYTES,
    WIRE_VERSION,
    Ack,
    Failed,
    HandleParams,
    Hello,
    MalformedError,
    Pull,
    Refused,
    Release,
    Request,
    Rows,
    Welcome,
    check_layout,
    decode_reply,
    encode,
)
from core.errors import IncompatibleError

#: Pulls in flight on one connection. Two keep the line busy while one message is checked and copied; the rest is slack.
_WINDOW = 4
_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class BrokenError(Exception):
    """The connection is of no use any more; holds the reason for every transfer on it."""


class Transfer:
    """One pull under way."""

    __slots__ = ("block_ids", "num_asked", "num_received", "ordered_s", "over", "params", "request_id")

    def __init__(self, pull: KVPull, params: HandleParams, ordered_s: float) -> None:
        self.request_id = pull.request_id
        self.block_ids = pull.block_ids
        self.params = params
        self.ordered_s = ordered_s  # monotonic
        self.num_asked = 0
        self.num_received = 0
        self.over = False


class Connection:
    """`ended(transfer, reason)` is called once for each transfer, with None where all of it arrived. Methods may raise
    BrokenError; `fail_all` and `close` are all that may be called then."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        layout: KVLayout,
        rows: BlockRows,
        blocks_per_message: int,
        timeout_s: float,
        ended: Callable[[Transfer, str | None], None],
    ) -> None:
        self.address = address
        self._layout = layout
        self._rows = rows
        self._blocks_per_message = blocks_per_message
        self._timeout_s = timeout_s
        self._ended = ended
        self._welcomed = False
        self._transfers: deque[Transfer] = deque()
        self._in_flight: deque[tuple[Pull, Transfer]] = deque()
        self._sequences = itertools.count()
        self.last_progress_s = time.monotonic()
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL, -1)
        self.socket.set(zmq.CONNECT_TIMEOUT, max(1, int(timeout_s * 1000)))
        self.socket.set(zmq.MAXMSGSIZE, max(MAX_HEADER_BYTES, blocks_per_message * rows.row_bytes))
        self.socket.set(zmq.RCVHWM, 2 * _WINDOW)
        self.socket.set(zmq.IPV6, int("[" in address))
        self.monitor = self.socket.get_monitor_socket(_BROKEN)
        try:
            self.socket.connect(address)
            self._send(Hello(WIRE_VERSION, layout))
        except (zmq.ZMQError, BrokenError) as error:
            self.close()
            raise BrokenError(f"cannot connect to {address}: {error}") from None

    @property
    def idle(self) -> bool:
        return not self._transfers

    @property
    def deadline_s(self) -> float | None:
        """When, on the monotonic clock, the peer must have said something. None where nothing is awaited."""
        return None if self.idle else self.last_progress_s + self._timeout_s

    def add(self, transfer: Transfer) -> None:
        """Begin to pull, behind what is there already."""
        if self.idle:
            self.last_progress_s = time.monotonic()
        self._transfers.append(transfer)
        self._pump()

    def cancel(self, transfer: Transfer) -> None:
        """The blocks are not wanted any more: nothing is written to them from here on, and the producer may free
        its own."""
        self._end(transfer, "cancelled")

    def receive(self) -> None:
        """Take in what has arrived."""
        for _ in range(2 * _WINDOW):
            try:
                header, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.last_progress_s = time.monotonic()
            try:
                reply = decode_reply(header.buffer)
            except MalformedError as error:
                raise BrokenError(f"{self.address} does not speak our protocol: {error}") from None
            if isinstance(reply, Welcome):
                self._take_welcome(reply)
            elif isinstance(reply, Refused):
                raise BrokenError(f"{self.address} refused: {reply.reason}")
            else:
                self._take_answer(reply, frames)
            self._pump()

    def check_monitor(self) -> None:
        """Raise if the connection broke. Called after `receive`, so that what had arrived by then counts."""
        try:
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return
        what = "was lost" if event["event"] == zmq.EVENT_DISCONNECTED else "could not be made"
        raise BrokenError(f"the connection to {self.address} {what}")

    def check_deadline(self, now_s: float) -> None:
        """Raise if the peer has been silent for too long."""
        deadline_s = self.deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            raise BrokenError(f"{self.address} sent nothing for {self._timeout_s:g} s")

    def fail_all(self, reason: str) -> None:
        """End every transfer; nothing more is sent."""
        while self._transfers:
            transfer = self._transfers.popleft()
            transfer.over = True
            self._ended(transfer, reason)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

    def _take_welcome(self, welcome: Welcome) -> None:
        try:
            check_layout(welcome.version, self._layout, welcome.layout)
        except IncompatibleError as error:
            raise BrokenError(f"{self.address} does not fit: {error}") from None
        self._welcomed = True

    def _take_answer(self, answer: Rows | Failed, frames: list[zmq.Frame]) -> None:
        # Answers come in the order of their pulls. One that was passed over will not come any more.
        while self._in_flight and self._in_flight[0][0].sequence < answer.sequence:
            self._end(self._in_flight.popleft()[1], f"an answer of {self.address} was lost")
        if not self._in_flight or self._in_flight[0][0].sequence != answer.sequence:
            raise BrokenError(f"{self.address} answered what nobody asked")
        pull, transfer = self._in_flight.popleft()
        if transfer.over:
            return
        if isinstance(answer, Failed):
            self._end(transfer, f"{self.address}: {answer.reason}")
            return
        reason = self._take_rows(pull, transfer, answer.checksums, frames)
        if reason is not None:
            self._end(transfer, f"{self.address}: {reason}")
            return
        transfer.num_received += pull.count
        if transfer.num_received == len(transfer.block_ids):
            self._end(transfer, None)

    def _take_rows(self, pull: Pull, transfer: Transfer, checksums: list[int], frames: list[zmq.Frame]) -> str | None:
        """Copy a message's blocks to where they belong, unless any is not what was sent; the reason then."""
        rows: list[Bytes] = []
        for frame in frames:
            if len(frame) == 0 or len(frame) % self._rows.row_bytes:
                return f"a frame of {len(frame)} bytes holds no whole number of blocks"
            rows.extend(np.frombuffer(frame.buffer, dtype=np.uint8).reshape(-1, self._rows.row_bytes))
        if not len(rows) == len(checksums) == pull.count:
            return f"{len(rows)} blocks and {len(checksums)} checksums came for {pull.count} blocks"
        for i, (row, checksum) in enumerate(zip(rows, checksums, strict=True)):
            if xxhash.xxh3_64_intdigest(row.data) != checksum:
                return f"checksum of block {pull.first + i} does not match"
        self._rows.scatter(transfer.block_ids[pull.first : pull.first + pull.count], rows)
        return None

    def _pump(self) -> None:
        """Keep the window full, the oldest transfer first."""
        if not self._welcomed:
            return
        for transfer in list(self._transfers):
            if not transfer.block_ids:
                self._end(transfer, None)
            while len(self._in_flight) < _WINDOW and transfer.num_asked < len(transfer.block_ids):
                count = min(self._blocks_per_message, len(transfer.block_ids) - transfer.num_asked)
                params = transfer.params
                pull = Pull(next(self._sequences), params.request_id, params.token, transfer.num_asked, count)
                self._send(pull)
                transfer.num_asked += count
                self._in_flight.append((pull, transfer))

    def _end(self, transfer: Transfer, reason: str | None) -> None:
        if transfer.over:
            return
        transfer.over = True
        self._transfers.remove(transfer)
        params = transfer.params
        self._ended(transfer, reason)
        # A failed pull releases too: the consumer computes for itself then, and the producer's blocks have no other
        # use.
        kind = Ack if reason is None else Release
        self._send(kind(params.request_id, params.token))

    def _send(self, message: Request) -> None:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise BrokenError(f"{self.address} takes nothing any more") from None
