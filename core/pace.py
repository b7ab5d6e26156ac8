"""How fast work is done, from what was done of late: what a "try again later" is worth is how well it says when."""

from __future__ import annotations

import math

#: What happened that long ago counts a third.
_MEMORY_S = 20.0
_FIRST_GUESS_S = 1.0
_MIN_S = 0.1
_MAX_S = 60.0


class Pace:
    """Work done per second of those in which there was any. One thread; times on one clock that is never set, in
    seconds."""

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._work = 0.0
        self._busy_s = 0.0

    def note(self, now_s: float, *, was_busy: bool, done: float = 0.0) -> None:
        """Until now work was under way, or was not; and `done` of it is finished."""
        elapsed_s = max(0.0, now_s - self._at_s)
        fading = math.exp(-elapsed_s / _MEMORY_S)
        self._at_s = now_s
        self._work = self._work * fading + done
        self._busy_s = self._busy_s * fading + (elapsed_s if was_busy else 0.0)

    def time_for(self, work: float) -> float:
        """Seconds until so much is done, between 0.1 and 60; a second where nothing is known yet."""
        if not self._work or not self._busy_s:
            return _FIRST_GUESS_S
        return min(max(work * self._busy_s / self._work, _MIN_S), _MAX_S)
