"""Connections to a Redis server, pooled: commands pipelined, and bulk replies streamed.

redis-py opens a connection (TLS, AUTH, SELECT) and reads the short replies with hiredis. Large values are another
matter: hiredis builds a bytes object of each, which has then to be copied again, and that is most of the cost of a GET.
`BulkReplies` reads the same protocol (RESP2) from the same socket through one small buffer that stays in the core's
cache, and hands out what it holds piece by piece. The two never mix within a pipeline, so neither has read what the
other one wants. redis-py's pool is left out too: its bookkeeping takes as long as the GET of a small item.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import redis

from connectors.ec.redis_errors import ServerError, UnreachableError, explain, server_error

Command = Sequence[bytes]

_BUFFER_BYTES = 256 * 1024
_MAX_LINE_BYTES = 4096


class _Buffers(threading.local):
    """One receive buffer a thread: a fresh one for each item would cost more than a small item does."""

    def __init__(self) -> None:
        self.mine = bytearray(_BUFFER_BYTES)


_buffers = _Buffers()


def pack(command: Command) -> bytes:
    """A command as RESP."""
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        parts += (b"$%d\r\n" % len(argument), argument, b"\r\n")
    return b"".join(parts)


class Link:
    """Used in a `with` block, by one thread. A connection that is left with replies unread is closed, not reused.

    Methods raise UnreachableError where the server is silent for its `socket_timeout` or the connection breaks.
    """

    def __init__(self, pool: LinkPool, connection: Any) -> None:
        self._pool = pool
        self._connection = connection
        self._sock: socket.socket | None = connection._sock  # not the connection's own sending: it would open it again
        self._num_unread = 0

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._num_unread:
            self._connection.disconnect()
        self._pool.take_back(self._connection)

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands whose replies are not waited for yet."""
        self._send([b"".join(map(pack, commands))], len(commands))

    def send_set(self, name: bytes, value: Sequence[bytes | memoryview], ttl_ms: int) -> None:
        """Send `SET name value PX ttl_ms`, `value` in pieces that are not copied together."""
        num_bytes = sum(len(piece) for piece in value)
        begin = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, num_bytes)
        ttl = b"%d" % ttl_ms
        end = b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl), ttl)
        self._send([begin, *value, end], 1)

    def receive(self) -> object:
        """The next reply. An error that the server answers is returned as ServerError, not raised; within an array it
        stays redis-py's."""
        reply: object
        try:
            reply = self._connection.read_response(disconnect_on_error=False)
        except redis.ConnectionError as error:
            raise explain(error) from None
        except redis.ResponseError as error:
            explained = explain(error)
            assert isinstance(explained, ServerError)
            reply = explained
        except (redis.RedisError, OSError) as error:
            raise explain(error) from None
        self._num_unread -= 1
        return reply

    def ask(self, *commands: Command) -> list[object]:
        """Send these commands and wait for their replies, in one round trip. Raises the first error among them."""
        replies = self.ask_each(commands)
        for reply in replies:
            if isinstance(reply, ServerError):
                raise reply
        return replies

    def ask_each(self, commands: Sequence[Command]) -> list[object]:
        """As `ask`, errors of single commands among the replies."""
        self.send(commands)
        return [self.receive() for _ in commands]

    def bulk_replies(self) -> BulkReplies:
        """To read the replies of what was sent, and is sent from now on, as bulk strings."""
        return BulkReplies(self._open_sock(), self._one_read)

    def _one_read(self) -> None:
        self._num_unread -= 1

    def _send(self, pieces: list[bytes | memoryview], num_commands: int) -> None:
        self._num_unread += num_commands
        sock = self._open_sock()
        try:
            for piece in pieces:
                sock.sendall(piece)
        except OSError as error:
            raise explain(error) from None

    def _open_sock(self) -> socket.socket:
        if self._sock is None:
            raise UnreachableError("the connection to Redis was closed")
        return self._sock


class LinkPool:
    """At most `max_connections` connections to one server, each made by `connect` (not yet connected) when it is
    needed. Any thread."""

    def __init__(self, connect: Callable[[], Any], max_connections: int) -> None:
        self._connect = connect
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._all: list[Any] = []
        self._idle: list[Any] = []
        self._closed = threading.Event()

    def link(self) -> Link:
        """Connects where no connection is idle. Raises StoreError; does not wait for others to return theirs."""
        with self._lock:
            if self._closed.is_set():
                raise UnreachableError("the connection to Redis was closed")
            if self._idle:
                connection = self._idle.pop()
            elif len(self._all) < self._max_connections:
                connection = self._connect()
                connection.redis_connect_func = self._greet
                self._all.append(connection)
            else:
                raise UnreachableError("all max_connections connections to Redis are in use")
        try:
            # A server that was restarted, or that closes idle connections, shows as something to read: the end.
            if connection._sock is not None and _is_readable(connection._sock):
                connection.disconnect()
            if connection._sock is None:
                connection.connect()
        except (redis.RedisError, OSError) as error:
            self.take_back(connection)
            raise explain(error) from None
        return Link(self, connection)

    def _greet(self, connection: Any) -> None:
        """The handshake over a socket that `close` can shut from now on, and would have shut before."""
        if self._closed.is_set():
            raise redis.ConnectionError("the connection to Redis was closed")
        connection.on_connect()

    def take_back(self, connection: Any) -> None:
        """Of a link that is done."""
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Shut all connections, those in use too: who waits on one is told so at once. Idempotent."""
        self._closed.set()
        with self._lock:
            for connection in self._all:
                connection.disconnect()


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class BulkReplies:
    """Replies that are bulk strings, in order: `begin`, then all of its bytes by `take` and `stream`, then the next.
    One object a thread at a time."""

    def __init__(self, sock: socket.socket, on_read: Callable[[], None]) -> None:
        self._sock = sock
        self._on_read = on_read
        self._buffer = _buffers.mine
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0  # of what was received and not handed out
        self._left = 0  # bytes of the present reply

    def begin(self) -> int | None:
        """Length of the next reply; None where the key does not exist. Raises ServerError for an error reply."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            self._on_read()
            raise server_error(rest.decode(errors="replace"))
        if kind != b"$" or not rest.lstrip(b"-").isdigit():
            raise UnreachableError("what answers does not speak Redis's protocol")
        length = int(rest)
        if length < 0:
            self._on_read()
            return None
        self._left = length
        if not length:
            self._end_reply()
        return length

    def take(self, num_bytes: int) -> bytes:
        """The next `num_bytes` of the present reply, or as many as it has left."""
        end = self._begin + num_bytes
        if end <= self._end and num_bytes < self._left:
            taken = bytes(self._view[self._begin : end])
            self._begin = end
            self._left -= num_bytes
            return taken
        pieces: list[bytes] = []
        self.stream(min(num_bytes, self._left), lambda piece: pieces.append(bytes(piece)))
        return b"".join(pieces)

    def stream(self, num_bytes: int, consume: Callable[[memoryview], None]) -> None:
        """Hand the next `num_bytes` of the present reply, which must have them, to `consume`, piece by piece. A piece
        is good until `consume` returns."""
        assert num_bytes <= self._left
        while num_bytes:
            if self._begin == self._end:
                self._fill()
            piece = self._view[self._begin : min(self._end, self._begin + num_bytes)]
            self._begin += len(piece)
            self._left -= len(piece)
            num_bytes -= len(piece)
            consume(piece)
            if not self._left:
                self._end_reply()

    def _end_reply(self) -> None:
        if self._line() != b"":
            raise UnreachableError("what answers does not speak Redis's protocol")
        self._on_read()

    def _line(self) -> bytes:
        """The next line, without its end."""
        line = b""
        while not line.endswith(b"\r\n"):
            if len(line) > _MAX_LINE_BYTES:
                raise UnreachableError("what answers does not speak Redis's protocol")
            if self._begin == self._end:
                self._fill()
            at = self._buffer.find(b"\n", self._begin, min(self._end, self._begin + _MAX_LINE_BYTES))
            end = at + 1 or min(self._end, self._begin + _MAX_LINE_BYTES)
            line += self._view[self._begin : end]
            self._begin = end
        return line[:-2]

    def _fill(self) -> None:
        try:
            count = self._sock.recv_into(self._view)
        except OSError as error:
            raise explain(error) from None
        if not count:
            raise UnreachableError("Redis closed the connection")
        self._begin, self._end = 0, count
