"""The producer's end of its consumers' connections, and the port that they come to."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator

from connectors.connections import BrokenError
from connectors.kv.listener import Listener
from connectors.kv.stream import Stream
from connectors.peer_messages import MalformedError

log = logging.getLogger(__name__)

#: One more, and one must go: a stranger, or who has been silent for longest. It comes back if it lives.
_MAX_CONSUMERS = 256
_BACKLOG = 128
#: Messages of one taken between two looks at the others.
_BATCH = 32
#: And put aside until it has taken away its answer; a consumer of ours asks for far fewer at a time.
_MAX_ASIDE = 16


class Consumer:
    """One connection. `aside`: requests that are to be served once nothing waits to be sent. `is_ours`: it has said
    something that we understand. `is_gone`: it takes no answers any more, but what it said before counts. `last_s`:
    when something went either way last, by the monotonic clock. `num_parked`: for the owner."""

    __slots__ = ("aside", "is_gone", "is_ours", "last_s", "num_parked", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.aside: deque[bytes] = deque()
        self.is_gone = False
        self.is_ours = False
        self.num_parked = 0
        self.last_s = time.monotonic()


class Consumers:
    """Binds in the constructor, which raises OSError; polled from `register` on, by the one thread that serves.

    What a consumer asks for while it has not taken away its last answer can be put `aside`, so that a slow one costs no
    memory here, and is heard all the same: it may say that it still wants its leases."""

    def __init__(self, host: str, port: int) -> None:
        host = host.removeprefix("[").removesuffix("]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        dual = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        self.port: int = listening.getsockname()[1]
        self._listener = Listener(listening)
        self._poller: select.poll | None = None
        self._open: dict[int, Consumer] = {}  # by descriptor

    @property
    def deadline_s(self) -> float | None:
        """When `messages` must be called, whether something is ready or not; by the monotonic clock."""
        return self._listener.deadline_s

    def register(self, poller: select.poll) -> None:
        self._poller = poller
        self._listener.register(poller)

    def messages(self, ready: Collection[int]) -> Iterator[tuple[Consumer, bytes]]:
        """The headers that have come to those of the descriptors that are ours, and those that were put aside and have
        their turn now. Newcomers are let in before."""
        for connected in self._listener.accepted(ready):
            self._let_in(connected)
        for descriptor in ready:
            consumer = self._open.get(descriptor)
            if consumer is not None:
                yield from self._messages_of(consumer)

    def send(self, consumer: Consumer, header: bytes, body: Iterable[memoryview] = ()) -> None:
        """Send a message, unless the consumer has gone. Never waits."""
        if consumer.is_gone:
            return
        try:
            consumer.stream.send(header, body)
        except BrokenError as error:
            self._give_up(consumer, error)
        self._watch(consumer)

    def close(self) -> None:
        """Idempotent."""
        for consumer in self._open.values():
            consumer.stream.close()
        self._open.clear()
        self._listener.close()

    def _messages_of(self, consumer: Consumer) -> Iterator[tuple[Consumer, bytes]]:
        stream, aside = consumer.stream, consumer.aside
        try:
            if stream.flush():
                consumer.last_s = time.monotonic()
        except BrokenError as error:
            self._give_up(consumer, error)
        for _ in range(_BATCH):
            while aside and not stream.num_waiting:  # before what came after them
                yield consumer, aside.popleft()
            try:
                message = stream.receive() if len(aside) < _MAX_ASIDE else None
            except (BrokenError, MalformedError) as error:
                self._drop(consumer, error)
                return
            if message is None:
                break
            consumer.last_s = time.monotonic()
            yield consumer, message.header
        self._watch(consumer)

    def _give_up(self, consumer: Consumer, reason: object) -> None:
        """It takes no answers any more. What it has said before it went is heard first: it may be that it has got all
        that it wanted, and that we may free it."""
        log.debug("a consumer has gone: %s", reason)
        consumer.is_gone = True
        consumer.aside.clear()
        consumer.stream.give_up_sending()

    def _watch(self, consumer: Consumer) -> None:
        assert self._poller is not None
        listens = select.POLLIN if len(consumer.aside) < _MAX_ASIDE else 0
        sends = select.POLLOUT if consumer.stream.num_waiting or consumer.aside else 0
        self._poller.register(consumer.stream, listens | sends)

    def _let_in(self, connected: socket.socket) -> None:
        if len(self._open) >= _MAX_CONSUMERS:
            last = min(self._open.values(), key=lambda consumer: (consumer.is_ours, consumer.last_s))
            self._drop(last, f"{_MAX_CONSUMERS} are connected")
        try:
            consumer = Consumer(Stream(connected, "a consumer", max_body_bytes=0))
        except OSError:
            connected.close()  # has gone already
            return
        self._open[connected.fileno()] = consumer
        self._watch(consumer)

    def _drop(self, consumer: Consumer, reason: object) -> None:
        log.debug("a consumer's connection ends: %s", reason)
        assert self._poller is not None
        consumer.is_gone = True
        consumer.aside.clear()
        descriptor = consumer.stream.fileno()
        self._poller.unregister(descriptor)
        del self._open[descriptor]
        consumer.stream.close()
