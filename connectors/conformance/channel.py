"""JSON lines over a Unix socket, with a deadline for every message. How the kit's processes talk."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec

_MAX_LINE_BYTES = 1 << 20
_SEND_S = 30.0


class ChannelError(Exception):
    """The other end has gone, is silent, or talks nonsense."""


class SilentError(ChannelError):
    """Nothing came in time."""


class Channel:
    """One end. Used by one thread. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""

    @classmethod
    def connect(cls, path: str, timeout_s: float) -> Channel:
        """To a listener at `path`. Raises ChannelError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise ChannelError(f"cannot connect: {error.strerror}") from None
        return cls(connection)

    def send(self, **message: Any) -> None:
        """Raises ChannelError."""
        self._socket.settimeout(_SEND_S)
        try:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise ChannelError(f"cannot send: {error.strerror}") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises SilentError, ChannelError."""
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise SilentError("nothing came in time")
            self._socket.settimeout(left_s)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError as error:
                raise ChannelError(f"cannot receive: {error.strerror}") from None
            if not data:
                raise ChannelError("the other end has gone")
            self._rest += data
            if len(self._rest) > _MAX_LINE_BYTES:
                raise ChannelError("a message without an end")
        line, _, self._rest = self._rest.partition(b"\n")
        message = msgspec.json.decode(line)
        if not isinstance(message, dict):
            raise ChannelError("not a message")
        return message

    def close(self) -> None:
        self._socket.close()
