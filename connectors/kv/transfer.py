"""The state of one pull: what has come, what is asked for, what must be asked for again."""

from __future__ import annotations

from collections import deque

from connectors.kv.base import KVPull
from connectors.kv.wire import HandleParams
from core.struct import Struct

#: A piece that came damaged, or did not come though later ones did, is asked for so often again.
_MAX_TRIES = 3
#: Connections that may break under a transfer without a single piece having come in between.
_MAX_LOSSES = 3
#: And so many may fall silent; a connection counts as silent after half the time limit.
_MAX_SILENCES = 2

NETWORK = "network"


class PullEnd(Struct, frozen=True):
    """How a pull ended. `reason` is None where all of it arrived."""

    request_id: str
    reason: str | None
    given_up: bool = False  # the router gave the lease up: no failure, nobody waits for it
    num_bytes: int = 0
    seconds: float = 0.0
    road: str = ""
    num_retries: int = 0


class Piece:
    """Blocks [first, first + count) of a transfer, which travel in one message."""

    __slots__ = ("asked_s", "count", "first", "tries")

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.tries = 0  # failed ones
        self.asked_s = 0.0  # monotonic


class Transfer:
    """One pull under way. The puller's thread only."""

    __slots__ = (
        "_losses",
        "_silences",
        "block_ids",
        "given_up",
        "missing",
        "num_received",
        "num_retries",
        "ordered_s",
        "over",
        "params",
        "problem",
        "request_id",
        "road",
    )

    def __init__(self, pull: KVPull, params: HandleParams, ordered_s: float) -> None:
        self.request_id = pull.request_id
        self.block_ids = pull.block_ids
        self.params = params
        self.ordered_s = ordered_s  # monotonic
        # What is to be asked for; what was asked for is in a connection's hands.
        self.missing = deque([Piece(0, len(pull.block_ids))] if pull.block_ids else [])
        self.num_received = 0
        self.num_retries = 0
        self.road = NETWORK
        self.given_up = False
        self.problem = ""  # the last one that was survived
        self.over = False
        self._losses = 0
        self._silences = 0

    @property
    def is_complete(self) -> bool:
        return self.num_received == len(self.block_ids)

    def next_piece(self, most: int) -> Piece:
        """At most so many blocks from the front of what is missing, of which there must be some."""
        piece = self.missing.popleft()
        if piece.count > most:
            rest = Piece(piece.first + most, piece.count - most)
            rest.tries = piece.tries
            self.missing.appendleft(rest)
            piece.count = most
        return piece

    def received(self, piece: Piece) -> None:
        self.num_received += piece.count
        self._losses = self._silences = 0

    def again(self, piece: Piece, problem: str) -> bool:
        """A piece came damaged or was lost: ask for it again. False where it was often enough."""
        piece.tries += 1
        self.problem = problem
        if piece.tries > _MAX_TRIES:
            return False
        self.num_retries += 1
        self.missing.appendleft(piece)
        return True

    def survive(self, problem: str, *, silent: bool) -> bool:
        """The connection is gone; go on over another. False where it was often enough."""
        self.problem = problem
        if silent:
            self._silences += 1
        else:
            self._losses += 1
        if self._losses > _MAX_LOSSES or self._silences >= _MAX_SILENCES:
            return False
        self.num_retries += 1
        return True
