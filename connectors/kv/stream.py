"""Messages over one TCP connection, none of whose ends waits: a header, and perhaps a body.

    4 bytes   length of the header       big-endian
    4 bytes   length of the body
    8 bytes   XXH3-64 of these lengths and the header
    header    msgpack (`wire.py`)
    body      blocks, end to end; they have checksums of their own, in the header

The body is sent from where it lies and received to where it belongs, many pieces a call: the kernel's copies are the
only ones. Each call takes as much as the kernel has (or has room for), and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from connectors.connections import BrokenError
from connectors.peer_messages import MAX_HEADER_BYTES, MalformedError

_PREFIX = struct.Struct("!IIQ")
_LENGTHS = struct.Struct("!II")
#: Pieces that one call sends or receives; the kernel takes 1024 at most.
_MAX_PIECES = 256
#: Small messages go at once. A peer that has vanished without a word is noticed after some 30 seconds, whether we send
#: or wait; where the system can be told so.
_OPTIONS = [
    (getattr(socket, name), value)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_USER_TIMEOUT", 30_000),
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
    )
    if hasattr(socket, name)
]


class Message(NamedTuple):
    """What has come but for its body, which is to be received next if it has one."""

    header: bytes
    body_bytes: int


def prefix_of(header: bytes | bytearray, body_bytes: int) -> bytes:
    """What goes before a header."""
    return _PREFIX.pack(len(header), body_bytes, _checksum(header, body_bytes))


def _checksum(header: bytes | bytearray, body_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest(_LENGTHS.pack(len(header), body_bytes) + header)


class Stream:
    """Owns `connected`, a connected socket; `peer` is its other end, for people. One thread's. Methods that send or
    receive raise BrokenError where the connection is lost, `receive` MalformedError where it is none of ours."""

    def __init__(self, connected: socket.socket, peer: str, max_body_bytes: int) -> None:
        self._socket = connected
        self._peer = peer
        self._max_body_bytes = max_body_bytes
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _OPTIONS:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._out: list[memoryview] = []
        self._prefix = bytearray(_PREFIX.size)
        self._header: bytearray | None = None  # None: the prefix has not come yet
        self._num_filled = 0  # bytes of the prefix, or of the header

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_waiting(self) -> int:
        """Pieces of memory that wait to be sent: call `flush` once the socket takes more."""
        return len(self._out)

    def send(self, header: bytes, body: Iterable[memoryview] = ()) -> None:
        """Send a message, behind what waits already. `body`: bytes, read until they have been sent."""
        pieces = list(body)
        body_bytes = sum(map(len, pieces))
        self._out.append(memoryview(prefix_of(header, body_bytes) + header))
        self._out += pieces
        self.flush()

    def flush(self) -> int:
        """Send what the socket takes now: how many bytes it was."""
        out, num_sent = self._out, 0
        while out:
            try:
                num_bytes = self._socket.sendmsg(out[:_MAX_PIECES])
            except BlockingIOError:
                break
            except OSError as error:
                raise self._lost(str(error)) from None
            advance(out, num_bytes)
            num_sent += num_bytes
        return num_sent

    def give_up_sending(self) -> None:
        """What waits to be sent is lost; what has come can be received all the same."""
        self._out.clear()

    def receive(self) -> Message | None:
        """The next message, or None where not all of it has come but for the body. Not before the last one's body was
        received."""
        if self._header is None:
            if not self._fill(self._prefix):
                return None
            header_bytes, body_bytes, _ = _PREFIX.unpack(self._prefix)
            if header_bytes > MAX_HEADER_BYTES or body_bytes > self._max_body_bytes:
                raise MalformedError(f"a header of {header_bytes} bytes and a body of {body_bytes}")
            self._header = bytearray(header_bytes)
        if not self._fill(self._header):
            return None
        header, self._header = self._header, None
        _, body_bytes, checksum = _PREFIX.unpack(self._prefix)
        if checksum != _checksum(header, body_bytes):
            raise MalformedError("the checksum of a header does not match")
        return Message(bytes(header), body_bytes)

    def receive_into(self, pieces: Sequence[memoryview]) -> int:
        """Receive what has come of a body, to these places, and no more than they hold: how many bytes it was."""
        try:
            num_bytes = self._socket.recvmsg_into(pieces[:_MAX_PIECES])[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(str(error)) from None
        if not num_bytes:
            raise self._lost("the other end closed it")
        return num_bytes

    def close(self) -> None:
        """What still waits to be sent is lost. Idempotent."""
        self._out.clear()
        self._socket.close()

    def _lost(self, reason: str) -> BrokenError:
        return BrokenError(f"the connection to {self._peer} was lost: {reason}", was_up=True)

    def _fill(self, target: bytearray) -> bool:
        """Whether all of it has come; what follows it begins at its beginning."""
        while self._num_filled < len(target):
            num_bytes = self.receive_into([memoryview(target)[self._num_filled :]])
            if not num_bytes:
                return False
            self._num_filled += num_bytes
        self._num_filled = 0
        return True


def advance(pieces: list[memoryview], num_bytes: int) -> None:
    """Take the first `num_bytes` away, which have been sent or filled; empty pieces behind them too."""
    count = 0
    while count < len(pieces) and len(pieces[count]) <= num_bytes:
        num_bytes -= len(pieces[count])
        count += 1
    del pieces[:count]
    if num_bytes:
        pieces[0] = pieces[0][num_bytes:]
