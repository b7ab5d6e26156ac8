"""The consumer's end of a connection to a producer: made without waiting, then a `Stream`."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from connectors.connections import BrokenError
from connectors.kv.stream import Message, Stream
from connectors.waker import Waker

#: Messages that wait for the connection to be made, or for a producer that takes none.
_MAX_WAITING = 1024
_MAX_PORT = 65535

#: As `getaddrinfo` has it.
_Place = tuple[Any, Any, int, str, Any]


class _Lookup:
    """The name of a host is looked up on a thread of its own, since a name server may take its time."""

    def __init__(self, host: str, port: int) -> None:
        self._waker = Waker()
        self._places: list[_Place] = []
        self._reason = ""
        self._done = threading.Event()
        # A daemon, since nothing can end it before its time; it holds nothing but the waker.
        threading.Thread(target=self._run, args=(host, port), name="kv-lookup", daemon=True).start()

    def fileno(self) -> int:
        """Readable when it is done."""
        return self._waker.reader.fileno()

    def places(self) -> list[_Place] | None:
        """None as long as it is not done. Raises OSError where there are none."""
        if not self._done.is_set():
            return None
        if self._reason:
            raise OSError(self._reason)
        return self._places

    def close(self) -> None:
        self._waker.close()

    def _run(self, host: str, port: int) -> None:
        try:
            self._places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._reason = str(error)
        self._done.set()
        self._waker.wake()


class Link:
    """For one thread, which polls it: `register` says for what, and is called again before each poll. A name may stand
    for several addresses; each is tried in its turn, and has its share of `timeout_s`. The constructor does not wait.
    Methods that send or receive raise BrokenError, once and for all; `receive` MalformedError too."""

    def __init__(self, address: str, max_body_bytes: int, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self.deadline_s: float | None = None  # monotonic: of `check_time`
        self._max_body_bytes = max_body_bytes
        self._lookup: _Lookup | None = None
        self._places: deque[_Place] = deque()  # not tried yet
        self._connecting: socket.socket | None = None
        self._stream: Stream | None = None
        self._waiting: list[bytes] = []  # for the stream
        self._poller: select.poll | None = None
        self._polled: tuple[int, int] | None = None  # descriptor and events
        host, _, digits = address.removeprefix("tcp://").rpartition(":")
        host, port = host.removeprefix("[").removesuffix("]"), int(digits)
        if port > _MAX_PORT:
            raise self._unmade(f"there is no port {port}")
        try:
            numeric = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            try:
                self._lookup = _Lookup(host, port)
            except (OSError, RuntimeError) as error:  # no descriptor or no thread to be had
                raise self._unmade(str(error)) from None
        else:
            self._places.extend(numeric)
            self._connect("")

    def fileno(self) -> int:
        """Of what is waited for now; -1 where the link is closed."""
        current = self._stream or self._connecting or self._lookup
        return -1 if current is None else current.fileno()

    def register(self, poller: select.poll) -> None:
        wants_out = self._connecting is not None or (self._stream is not None and self._stream.num_waiting > 0)
        wanted = self.fileno(), select.POLLIN | (select.POLLOUT if wants_out else 0)
        if wanted != self._polled:
            self.unregister(poller)
            poller.register(*wanted)
            self._poller, self._polled = poller, wanted

    def unregister(self, poller: select.poll) -> None:
        if self._polled is not None:
            poller.unregister(self._polled[0])
            self._polled = None

    @property
    def is_busy(self) -> bool:
        """Whether so much waits to be sent that what can be said later should be."""
        return self._num_waiting >= _MAX_WAITING // 2

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) if self._stream is None else self._stream.num_waiting

    def send(self, header: bytes) -> None:
        """Send a message without a body, as soon as that can be done."""
        if self._num_waiting >= _MAX_WAITING:
            raise BrokenError(f"{self.address} takes nothing any more", was_up=True)
        if self._stream is None:
            self._waiting.append(header)
        else:
            self._stream.send(header)

    def receive(self) -> Message | None:
        """As `Stream.receive`. When the poller says that there is something to do, which may be to connect."""
        if self._stream is None:
            self._make()
        if self._stream is None:
            return None
        self._stream.flush()
        return self._stream.receive()

    def receive_into(self, pieces: Sequence[memoryview]) -> int:
        """As `Stream.receive_into`, after `receive` has returned a message."""
        assert self._stream is not None
        self._stream.flush()
        return self._stream.receive_into(pieces)

    def check_time(self, now_s: float) -> None:
        """Go on to the next address where this one keeps silent for too long. Raises BrokenError."""
        if self.deadline_s is not None and now_s >= self.deadline_s and self._connecting is not None:
            if self._poller is not None:
                self.unregister(self._poller)
            self._connecting.close()
            self._connect("it does not answer")

    def close(self) -> None:
        """Idempotent."""
        for part in (self._lookup, self._connecting, self._stream):
            if part is not None:
                part.close()
        self._lookup = self._connecting = self._stream = None

    def _make(self) -> None:
        """The next step on the way to a connection, when the last one is done."""
        if self._poller is not None:
            self.unregister(self._poller)  # before the descriptor is closed, and perhaps another link's
        if self._lookup is not None:
            try:
                places = self._lookup.places()
            except OSError as error:
                raise self._unmade(str(error)) from None
            if places is not None:
                self._lookup.close()
                self._lookup = None
                self._places.extend(places)
                self._connect("it has no address")
        elif self._connecting is not None:
            code = self._connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._connecting.close()
                self._connect(os.strerror(code))
                return
            self._stream = Stream(self._connecting, self.address, self._max_body_bytes)
            self._connecting = self.deadline_s = None
            for header in self._waiting:
                self._stream.send(header)
            self._waiting.clear()

    def _connect(self, reason: str) -> None:
        """Begin to connect to the next address; `reason`: why the last one could not be had."""
        self._connecting = self.deadline_s = None
        share_s = self._timeout_s / max(1, len(self._places))
        while self._places:
            family, kind, protocol, _, place = self._places.popleft()
            try:
                connecting = socket.socket(family, kind, protocol)
            except OSError as error:
                reason = str(error)
                continue
            connecting.setblocking(False)
            code = connecting.connect_ex(place)
            if code in (0, errno.EINPROGRESS):
                self._connecting = connecting
                if self._places:  # the last one may take as long as its owner lets it
                    self.deadline_s = time.monotonic() + share_s
                return
            connecting.close()
            reason = os.strerror(code)
        raise self._unmade(reason)

    def _unmade(self, reason: str) -> BrokenError:
        return BrokenError(f"the connection to {self.address} could not be made: {reason}")
