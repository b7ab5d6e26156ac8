"""The consumer's end of one connection to one producer: handshake, questions, chunks in a window, checksums.

No thread of its own: `PeerClient`'s calls it. What is lost or damaged is asked for again; a connection that breaks is
replaced by the client, and what was under way goes on with the chunks that are still lacking.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

import xxhash
import zmq

from connectors.connections import BrokenError
from connectors.ec.peer_orders import Order, Question, Transfer
from connectors.ec.peer_wire import (
    MAX_KEYS,
    WIRE_VERSION,
    Answer,
    Ask,
    Done,
    Failed,
    Found,
    Hello,
    Item,
    Open,
    Pull,
    Refused,
    Request,
    Welcome,
    decode_reply,
    dtype_name,
    encode,
)
from connectors.ec.store import CHUNK_BYTES
from connectors.peer_messages import MAX_HEADER_BYTES, MalformedError
from connectors.zmq_link import Link

#: Chunks in flight on one connection: they keep the line busy while one is checked and copied.
_WINDOW = 8
#: Silence after which a connection is given up, as a part of an order's limit: one that was up is replaced while there
#: is time to go on; one that is not must not be taken for dead because its peer is busy.
_MAX_SILENCE, _MAX_SILENCE_AT_FIRST = 0.25, 0.9
#: Messages taken in before other connections have their turn.
_BATCH = 2 * _WINDOW
#: How often one chunk is asked for before its item is given up.
_MAX_TRIES = 3


class _Sent:
    """A request whose answer is awaited."""

    __slots__ = ("index", "orders", "request")

    def __init__(self, request: Ask | Open | Pull, orders: list[Order], index: int = 0) -> None:
        self.request = request
        self.orders = orders
        self.index = index  # of the chunk


class PeerConnection:
    """Orders that have ended are in `ended`, for the client to take. Methods may raise BrokenError; `take_orders` and
    `close` are all that may be called then."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, namespace: str, limit_s: float) -> None:
        self.address = address
        self.ended: list[Order] = []
        self.has_answered = False
        self._namespace = namespace
        self._limit_s = limit_s
        self._instance: str | None = None  # None: not welcomed yet
        self._questions: deque[Order] = deque()
        self._transfers: list[Transfer] = []
        self._in_flight: deque[_Sent] = deque()
        self._sequences = itertools.count()
        self.last_progress_s = time.monotonic()
        self.link = Link(
            context,
            address,
            connect_timeout_s=limit_s,
            max_frame_bytes=max(MAX_HEADER_BYTES, CHUNK_BYTES),
            max_queued=4 * _WINDOW,
        )
        try:
            self._send(Hello(WIRE_VERSION, namespace))
        except BrokenError:
            self.link.close()
            raise

    @property
    def idle(self) -> bool:
        return not self._transfers and not self._questions and not self._in_flight

    @property
    def deadline_s(self) -> float | None:
        """When, on the monotonic clock, the peer must have said something. None where nothing is awaited."""
        return None if self.idle and self.is_up else self.last_progress_s + self._silence_s

    @property
    def is_up(self) -> bool:
        """Whether the peer has greeted us."""
        return self._instance is not None

    @property
    def _silence_s(self) -> float:
        return self._limit_s * (_MAX_SILENCE if self.is_up else _MAX_SILENCE_AT_FIRST)

    def add(self, order: Order) -> None:
        """Begin, behind what is there already."""
        if self.idle:
            self.last_progress_s = time.monotonic()
        if isinstance(order, Transfer):
            self._transfers.append(order)
        else:
            self._questions.append(order)

    def drop(self, order: Order) -> None:
        """It is over: whatever still comes for it is ignored."""
        order.over = True
        if isinstance(order, Transfer) and order in self._transfers:
            self._transfers.remove(order)

    def receive(self) -> None:
        """Take in some of what has arrived, and ask for more."""
        for _ in range(_BATCH):
            message = self.link.receive()
            if message is None:
                break
            self.last_progress_s = time.monotonic()
            try:
                reply = decode_reply(message[0].buffer)
            except MalformedError as error:
                raise BrokenError(f"{self.address} does not speak our protocol: {error}") from None
            if isinstance(reply, Welcome):
                self._take_welcome(reply)
            elif isinstance(reply, Refused):
                raise BrokenError(f"{self.address} refused: {reply.reason}")
            else:
                self._take_answer(reply, message[1:])
            self.pump()

    def check_deadline(self, now_s: float) -> None:
        """Raise if the peer has been silent for too long."""
        deadline_s = self.deadline_s
        if deadline_s is not None and now_s >= deadline_s:
            raise BrokenError(f"{self.address} sent nothing for {self._silence_s:g} s", was_up=self.is_up)

    def pump(self) -> None:
        """Send what there is to send: questions first, then chunks while the window has room, oldest transfer first."""
        if not self.is_up:
            return
        while self._questions:
            self._ask([self._questions.popleft() for _ in range(min(MAX_KEYS, len(self._questions)))])
        for transfer in list(self._transfers):
            if transfer.source.instance != self._instance:
                self._end(transfer, f"{self.address} was started again since")
                continue
            while len(self._in_flight) < _WINDOW and self._request_next(transfer):
                pass

    def take_orders(self) -> list[Order]:
        """Everything that is not over, each once, for another connection; this one is of no use any more."""
        flying = (order for sent in self._in_flight for order in sent.orders)
        orders = dict.fromkeys((*flying, *self._questions, *self._transfers))
        for sent in self._in_flight:
            self._put_back(sent)
        return [order for order in orders if not order.over]

    def close(self) -> None:
        self.link.close()

    def _ask(self, batch: list[Order]) -> None:
        asked = []
        for order in batch:
            if order.source.instance == self._instance:
                asked.append(order)
            elif not order.over:
                self._end(order, None)  # what an encoder held before it was started again is gone
        if asked:
            items = [(order.key, order.source.token) for order in asked]
            self._request(_Sent(Ask(next(self._sequences), items), asked))

    def _request_next(self, transfer: Transfer) -> bool:
        """Ask for one more chunk; False where none is to be asked for now."""
        key, token = transfer.key, transfer.source.token
        if transfer.checksums is None:
            if transfer.is_opening:
                return False
            transfer.is_opening = True
            self._request(_Sent(Open(next(self._sequences), key, token), [transfer]))
            return True
        if not transfer.missing:
            return False
        index = transfer.missing.popleft()
        again = index in transfer.tries
        self._request(_Sent(Pull(next(self._sequences), key, token, index, again), [transfer], index))
        return True

    def _request(self, sent: _Sent) -> None:
        self._in_flight.append(sent)
        self._send(sent.request)

    def _take_welcome(self, welcome: Welcome) -> None:
        if (welcome.version, welcome.namespace) != (WIRE_VERSION, self._namespace):
            theirs = f"version {welcome.version}, namespace {welcome.namespace}"
            raise BrokenError(f"{self.address} has {theirs}; ours is {WIRE_VERSION}, {self._namespace}")
        self._instance = welcome.instance

    def _take_answer(self, answer: Answer, frames: list[zmq.Frame]) -> None:
        # Answers come in the order of their questions. One that was passed over will not come any more.
        while self._in_flight and self._in_flight[0].request.sequence < answer.sequence:
            self._take_loss(self._in_flight.popleft())
        if not self._in_flight or self._in_flight[0].request.sequence != answer.sequence:
            raise BrokenError(f"{self.address} answered what nobody asked")
        sent = self._in_flight[0]
        if not _fits(answer, sent, frames):
            raise BrokenError(f"{self.address} answered something else")
        self._in_flight.popleft()
        self.has_answered = True
        if isinstance(answer, Found):
            for order, found in zip(sent.orders, answer.found, strict=True):
                if isinstance(order, Question) and not order.over:
                    order.found = found
                    self._end(order, None)
            return
        transfer = sent.orders[0]
        assert isinstance(transfer, Transfer)
        if isinstance(answer, Failed):
            self._end(transfer, f"{self.address}: {answer.reason}")
        elif isinstance(answer, Item):
            self._take_item(transfer, answer, frames[0])
        else:
            self._take_chunk(transfer, answer.index, frames[0])

    def _take_item(self, transfer: Transfer, item: Item, frame: zmq.Frame) -> None:
        if transfer.over:
            return
        target = transfer.target
        expected = (transfer.key, dtype_name(target.dtype), target.shape, transfer.num_left)
        actual = (item.key, item.dtype, item.shape, len(item.checksums))
        for what, ours, theirs in zip(("key", "dtype", "shape", "number of chunks"), expected, actual, strict=True):
            if ours != theirs:
                self._end(transfer, f"{self.address}: {what} of the item is {theirs}, not {ours}")
                return
        transfer.is_opening = False
        transfer.checksums = item.checksums
        transfer.missing.popleft()
        self._take_chunk(transfer, 0, frame)

    def _take_chunk(self, transfer: Transfer, index: int, frame: zmq.Frame) -> None:
        if transfer.over:
            return
        assert transfer.checksums is not None
        offset = index * CHUNK_BYTES
        data = frame.buffer
        if len(data) != min(CHUNK_BYTES, transfer.num_bytes - offset):
            self._retry(transfer, index, f"chunk {index} of the item has {len(data)} bytes")
        elif xxhash.xxh3_128_digest(data) != transfer.checksums[index]:
            self._retry(transfer, index, f"checksum of chunk {index} of the item does not match")
        else:
            transfer.target.write(data, offset)
            transfer.num_left -= 1
            if not transfer.num_left:
                transfer.target.commit()
                self._end(transfer, None)
                self._send(Done(transfer.key, transfer.source.token))

    def _take_loss(self, sent: _Sent) -> None:
        self._put_back(sent)
        if isinstance(sent.request, Ask):
            self._questions.extend(order for order in sent.orders if not order.over)
            return
        transfer = sent.orders[0]
        assert isinstance(transfer, Transfer)
        self._count_try(transfer, sent.index, "an answer was lost")

    def _put_back(self, sent: _Sent) -> None:
        """Its answer will not come: what it asked for is missing again."""
        for order in sent.orders:
            if isinstance(order, Transfer):
                if isinstance(sent.request, Open):
                    order.is_opening = False
                else:
                    order.missing.appendleft(sent.index)

    def _retry(self, transfer: Transfer, index: int, reason: str) -> None:
        transfer.missing.appendleft(index)
        self._count_try(transfer, index, reason)

    def _count_try(self, transfer: Transfer, index: int, reason: str) -> None:
        tries = transfer.tries[index] = transfer.tries.get(index, 0) + 1
        if tries >= _MAX_TRIES:
            self._end(transfer, f"{self.address}: {reason}, {tries} times")

    def _end(self, order: Order, reason: str | None) -> None:
        if not order.over:
            order.reason = reason
            self.drop(order)
            self.ended.append(order)

    def _send(self, message: Request) -> None:
        self.link.send(encode(message))


def _fits(answer: Answer, sent: _Sent, frames: list[zmq.Frame]) -> bool:
    """Whether it is an answer to what was asked."""
    request = sent.request
    if isinstance(answer, Found):
        return isinstance(request, Ask) and len(answer.found) == len(sent.orders)
    if isinstance(answer, Failed):
        return not isinstance(request, Ask)
    if isinstance(answer, Item):
        return isinstance(request, Open) and len(frames) == 1
    return isinstance(request, Pull) and answer.index == sent.index and len(frames) == 1
