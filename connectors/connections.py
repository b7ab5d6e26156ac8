"""The connections of one consumer's thread, one to each producer: how many, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

_MAX_CONNECTIONS = 64
#: A connection that nothing used for so long is closed.
_IDLE_CLOSE_S = 60.0


class BrokenError(Exception):
    """A connection is of no use any more; holds the reason. `was_up`: it had been made before it broke."""

    def __init__(self, reason: str, *, was_up: bool = False) -> None:
        super().__init__(reason)
        self.was_up = was_up


class Link(Protocol):
    """What a poller can wait for; of which kind, zmq's or the system's, is between the link and its owner."""

    def register(self, poller: Any) -> None: ...

    def unregister(self, poller: Any) -> None: ...


class Connection(Protocol):
    """What a connection must tell. Times are of the monotonic clock; no `deadline_s`: nothing is awaited."""

    address: str
    last_progress_s: float

    @property
    def link(self) -> Link: ...

    @property
    def idle(self) -> bool: ...

    @property
    def deadline_s(self) -> float | None: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Connections(Generic[C]):
    """By address; with `poller`, of the kind their links take, as long as they are here. One thread's."""

    def __init__(self, poller: object) -> None:
        self._poller = poller
        self._open: dict[str, C] = {}

    def get(self, address: str) -> C | None:
        return self._open.get(address)

    def __iter__(self) -> Iterator[C]:
        """Those of now; they may be removed meanwhile."""
        return iter(list(self._open.values()))

    def has_room(self) -> bool:
        """For one more; the one that was idle for longest is closed where there are too many."""
        if len(self._open) < _MAX_CONNECTIONS:
            return True
        idle = [connection for connection in self._open.values() if connection.idle]
        if idle:
            self.remove(min(idle, key=lambda connection: connection.last_progress_s))
        return bool(idle)

    @property
    def are_full(self) -> bool:
        return len(self._open) >= _MAX_CONNECTIONS

    def add(self, connection: C) -> None:
        self._open[connection.address] = connection
        connection.link.register(self._poller)

    def remove(self, connection: C) -> None:
        """Close one."""
        del self._open[connection.address]
        connection.link.unregister(self._poller)
        connection.close()

    def remove_idle(self, now_s: float) -> None:
        """Close those that were idle for too long."""
        for connection in self:
            if connection.idle and now_s >= connection.last_progress_s + _IDLE_CLOSE_S:
                self.remove(connection)

    def times_s(self) -> list[float]:
        """When each must be looked at, whether something has come or not."""
        return [c.last_progress_s + _IDLE_CLOSE_S if c.deadline_s is None else c.deadline_s for c in self]

    def close(self) -> None:
        """All of them; the poller has been used for the last time."""
        for connection in self:
            connection.close()
        self._open.clear()
