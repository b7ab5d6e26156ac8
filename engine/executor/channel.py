"""Messages between an engine and a worker process, over one pair of connected Unix sockets.

The pair is made before the process and handed down to it: it has no name that others could find, and the kernel says at
once when either side is gone, however it went. A message is its length, 8 bytes, and that many bytes; an empty message
asks the other side to look up.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from core.errors import EngineError

#: A reader that takes nothing for so long is stopped or hangs.
_SEND_TIMEOUT_S = 30
#: A step's orders hold the image files of that step, and little else. More than this was not written by us.
MAX_MESSAGE_BYTES = 1 << 34
_LENGTH = struct.Struct("<Q")


class Channel:
    """One end. `send` from any thread, `receive` from one thread, which must never stop calling it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        self._lock = threading.Lock()

    def send(self, message: bytes = b"") -> None:
        """Raises EngineError where the other side is gone or has not read for 30 s; nothing can be sent after that."""
        with self._lock:
            try:
                self._socket.sendall(_LENGTH.pack(len(message)) + message)
            except OSError as error:
                self._hang_up()  # perhaps in the middle of a message
                raise EngineError(f"a worker cannot be reached: {error.strerror}") from None

    def receive(self) -> bytearray | None:
        """The next message; None once the other side is gone. Waits for ever: the kernel ends it."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > MAX_MESSAGE_BYTES:
            raise EngineError(f"a worker's message claims {size} bytes, the limit is {MAX_MESSAGE_BYTES}")
        return self._read(size)

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except OSError:  # reset, or closed here
                return None
            if not count:
                return None
            rest = rest[count:]
        return data

    def close(self) -> None:
        """Ends the other side's `receive` too, and one that waits here. Idempotent."""
        self._hang_up()
        self._socket.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
