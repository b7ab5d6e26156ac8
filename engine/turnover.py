"""When an engine that holds as many requests as it may has room for another one."""

from __future__ import annotations

import time

from core.pace import Pace


class Turnover:
    """How fast requests have left the engine of late, whatever they ended in. Step thread only."""

    def __init__(self) -> None:
        self._pace = Pace(time.monotonic())
        self._num_held = 0

    def came(self) -> None:
        """A request was taken."""
        self.note(self._num_held)
        self._num_held += 1

    def note(self, num_held: int) -> None:
        """So many are held now; those that are missing have ended."""
        self._pace.note(time.monotonic(), was_busy=self._num_held > 0, done=self._num_held - num_held)
        self._num_held = num_held

    def next_end_s(self) -> float:
        """Seconds until one more will have ended, between 0.1 and 60; a second where none ever did."""
        self.note(self._num_held)
        return self._pace.time_for(1)
