"""Either end of a KV connection, said by hand: plain sockets that wait, and the framing of `connectors.kv.stream`."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from typing import TypeVar

import msgspec
import torch
import xxhash

from connectors.kv.stream import Stream, prefix_of
from connectors.kv.wire import (
    WIRE_VERSION,
    Ack,
    Hello,
    Pull,
    Release,
    Renew,
    Rows,
    Welcome,
    decode_request,
    encode,
)
from tests.connectors.support import DEADLINE_S, LAYOUT, KVPair

Kind = TypeVar("Kind", Ack, Hello, Pull, Release, Renew)

_PREFIX = struct.Struct("!IIQ")


def framed(header: bytes, *rows: bytes) -> bytes:
    """A message as it goes over the line."""
    body = b"".join(rows)
    return prefix_of(header, len(body)) + header + body


class Raw:
    """One end of a connection. What does not happen in time raises TimeoutError."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(DEADLINE_S)
        # As ours: else what is said last waits here, and is lost where the end is closed.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def to(cls, address: str, receive_bytes: int = 0) -> Raw:
        """A consumer's. `receive_bytes`: so much the system keeps for it, about; 0: as the system likes."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        made = socket.socket()
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(DEADLINE_S)
        made.connect((host, int(port)))
        return cls(made)

    def say(self, header: bytes, *rows: bytes) -> None:
        self.socket.sendall(framed(header, *rows))

    def throw(self, data: bytes) -> None:
        """Bytes as they are; the other end may have enough of them before the last one."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def hear(self) -> tuple[bytes, bytes]:
        """The next message: header and body."""
        header_bytes, body_bytes, _ = _PREFIX.unpack(self._read(_PREFIX.size))
        header = self._read(header_bytes)
        body = self._read(body_bytes)
        assert framed(header, body)[: _PREFIX.size] == prefix_of(header, body_bytes)
        return header, body

    def is_served(self) -> bool:
        """Whether a producer of `LAYOUT` still listens, and answers nothing but what it is asked."""
        self.say(encode(Hello(WIRE_VERSION, LAYOUT)))
        return self.hear() == (encode(Welcome(WIRE_VERSION, LAYOUT)), b"")

    def has_ended(self) -> bool:
        """Whether the other end closes the connection next, and says nothing before."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            more = self.socket.recv(num_bytes - len(data))
            if not more:
                raise ConnectionError("the other end closed the connection")
            data += more
        return bytes(data)


class Scripted:
    """A producer that says what a test wants it to say, over the newest connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self._open: list[Raw] = []
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connection(self) -> Raw:
        return self._open[-1]

    def expect(self, *kinds: type[Kind]) -> Kind:
        """The next request. A Hello comes over a connection of its own, which is waited for."""
        if Hello in kinds:
            self._open.append(Raw(self._listener.accept()[0]))
        header, body = self.connection.hear()
        request = decode_request(header)
        assert isinstance(request, kinds), request
        assert not body, "a consumer sent a body"
        return request

    def say(self, header: bytes, *rows: bytes) -> None:
        """One message; the rows are its body."""
        self.connection.say(header, *rows)

    def throw(self, data: bytes) -> None:
        self.connection.throw(data)

    def hang_up(self) -> None:
        self.connection.close()

    def welcome(self) -> Pull:
        """Go through the handshake; the first pull."""
        self.expect(Hello)
        self.say(encode(Welcome(WIRE_VERSION, LAYOUT)))
        return self.expect(Pull)

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._listener.close()


def row(n: int) -> bytes:
    return bytes([n]) * (LAYOUT.elements_per_block * 4)


def rows_message(pull: Pull, *numbers: int) -> list[bytes]:
    """An answer with rows that hold these numbers: header, and the rows."""
    rows = [row(n) for n in numbers]
    return [encode(Rows(pull.sequence, xxhash.xxh3_128_digest(b"".join(rows)))), *rows]


def bytes_of(decode: KVPair, num_blocks: int) -> bytes:
    return decode.blocks[:num_blocks].view(torch.uint8).numpy().tobytes()


def nonsense() -> list[bytes]:
    """Headers that are framed as they should be, and are no request."""
    token = "0" * 32
    pack = msgspec.msgpack.encode
    return [
        b"",
        b"\xc1",
        b"\x91" * 60_000,
        pack(["Pull", -1, "r", token, 0, 1, False]),
        pack(["Pull", 1, "r", token, 0, 2**31, False]),
        pack(["Pull", 1, "r" * 5000, token, 0, 1, False]),
        pack(["Pull", 1]),
        pack(["Hello", 1, {"version": "x"}]),
        pack(["Nonsense", 1]),
        pack({"Pull": 1}),
        encode(Welcome(WIRE_VERSION, LAYOUT)),
    ]


def tcp_pair(*, tiny: bool = False) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback; `tiny`: the first one can send little at a time, to the second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if tiny:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least that the system has
        one = socket.socket()
        if tiny:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        one.settimeout(DEADLINE_S)
        one.connect(listener.getsockname())
        return one, listener.accept()[0]


def wait_readable(*ends: socket.socket | Stream) -> None:
    """Until there is something to receive at one of them, or its other end has gone."""
    assert select.select(ends, [], [], DEADLINE_S)[0], "nothing came"
