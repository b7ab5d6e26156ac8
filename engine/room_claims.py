"""Who takes the next rows of an encoder buffer that has too few: the vision tower or the requests, by turns.

A side that finds no room has a *claim*, and until the one that claimed first has its rows, the other takes none. Its
turn over, it stands behind the other. So neither starves, however steady the stream of the other's items is.
"""

from __future__ import annotations

import enum

#: Steps that a claim may stand before requests that would only hold items which are in the buffer wait too.
_LONG_STEPS = 64


class Side(enum.Enum):
    """Where items come from."""

    ENCODER = enum.auto()
    REQUESTS = enum.auto()


class RoomClaims:
    """Part of `ItemGate`. Step thread only."""

    def __init__(self) -> None:
        self._order: list[Side] = []  # the first to lack room first
        self._lacking: set[Side] = set()  # those that lacked room in this step
        self._first_before: Side | None = None  # when this step began
        self._num_steps = 0  # for which the first has found no room

    @property
    def is_long(self) -> bool:
        """Whether somebody has lacked room for many steps."""
        return self._num_steps > _LONG_STEPS

    def may_take(self, side: Side) -> bool:
        """Whether the other side does not come first."""
        return not self._order or self._order[0] is side

    def claim(self, side: Side) -> None:
        """It lacks room, or waits for the other side's turn to end."""
        self._lacking.add(side)
        if side not in self._order:
            self._order.append(side)

    def take(self, side: Side) -> None:
        """It has its rows."""
        if side in self._order:
            self._order.remove(side)
            self._num_steps = 0

    def begin_step(self) -> None:
        self._lacking.clear()
        self._first_before = self._first
        self._num_steps = self._num_steps + 1 if self._order else 0

    def end_step(self) -> bool:
        """Drop the claims of those that lacked nothing in this step: whoever did has ended. Returns whether a turn is
        over, for which others may have been refused in this step."""
        self._order = [side for side in self._order if side in self._lacking]
        if self._first is self._first_before:
            return False
        self._num_steps = 0
        return self._first_before is not None

    @property
    def _first(self) -> Side | None:
        return self._order[0] if self._order else None
