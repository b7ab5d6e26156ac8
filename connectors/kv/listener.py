"""A port, or a name, that others come to, watched by a thread that has other things to do as well."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Collection, Iterator

#: Let in between two looks at other work.
_BATCH = 32
#: Where nobody can be let in, mostly for want of a descriptor, the next look is taken after so long. Whoever waits
#: there would else wake the thread again at once, and for ever.
_REST_S = 0.2


class Listener:
    """Owns `listening`, a listening socket. One thread's, from `register` on."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        self._socket.setblocking(False)
        self._poller: select.poll | None = None
        self.deadline_s: float | None = None  # monotonic: of the next look, where it rests

    def register(self, poller: select.poll) -> None:
        self._poller = poller
        poller.register(self._socket, select.POLLIN)

    def accepted(self, ready: Collection[int]) -> Iterator[socket.socket]:
        """Those that have come, if that is among the descriptors `ready`, or if it has rested for long enough."""
        assert self._poller is not None
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            self.deadline_s = None
            self._poller.register(self._socket, select.POLLIN)
        elif self._socket.fileno() not in ready:
            return
        for _ in range(_BATCH):
            try:
                connected, _address = self._socket.accept()
            except (BlockingIOError, ConnectionError):  # nobody, or somebody who has gone again
                return
            except OSError:
                self._poller.unregister(self._socket)
                self.deadline_s = time.monotonic() + _REST_S
                return
            yield connected

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
