"""What a consumer wants of a producer: an answer, or an item."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from connectors.ec.peer_wire import Source
from connectors.ec.store import CHUNK_BYTES, LoadTarget


class Order:
    """Base of both."""

    __slots__ = ("deadline_s", "key", "num_moves", "over", "reason", "source")

    def __init__(self, key: str, source: Source, deadline_s: float) -> None:
        self.key = key
        self.source = source
        self.deadline_s = deadline_s  # monotonic
        self.num_moves = 0  # to another connection, after one broke
        self.over = False
        self.reason: str | None = None  # why it failed


class Question(Order):
    """Whether the producer holds the item."""

    __slots__ = ("found",)

    def __init__(self, key: str, source: Source, deadline_s: float) -> None:
        super().__init__(key, source, deadline_s)
        self.found = False


class Transfer(Order):
    """One item, of `num_bytes`, on its way into a target, which is made on the client's thread: it may take memory."""

    __slots__ = ("_make_target", "_target", "checksums", "is_opening", "missing", "num_bytes", "num_left", "tries")

    def __init__(
        self, key: str, source: Source, deadline_s: float, num_bytes: int, make_target: Callable[[], LoadTarget]
    ) -> None:
        super().__init__(key, source, deadline_s)
        self._make_target = make_target
        self._target: LoadTarget | None = None
        self.num_bytes = num_bytes
        self.checksums: list[bytes] | None = None  # None: not opened yet
        self.is_opening = False
        num_chunks = -(-num_bytes // CHUNK_BYTES)
        self.missing = deque(range(num_chunks))  # not asked for
        self.num_left = num_chunks  # not arrived
        self.tries: dict[int, int] = {}

    @property
    def target(self) -> LoadTarget:
        if self._target is None:
            self._target = self._make_target()
        return self._target
