"""Ends another thread's poll, so that it can sleep until there is something to do."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """A pair of connected sockets; the polling thread registers `reader`. (ZeroMQ's own sockets belong to one
    thread.)"""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        """Any thread, any time, even after `close`. Never waits: where the pipe is full, the reader wakes anyway."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        """The polling thread, before it looks for what it was woken for."""
        with contextlib.suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass

    def close(self) -> None:
        self._writer.close()
        self.reader.close()
