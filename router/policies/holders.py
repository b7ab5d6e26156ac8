"""Which workers were given what: the router's guess at what their caches hold, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict

#: Workers remembered for one thing, the latest ones.
_MAX_HOLDERS = 8


class Holders:
    """Names of workers by key, the least recently noted keys forgotten first. Some 300 bytes a key."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def get(self, key: bytes) -> tuple[str, ...]:
        """The latest one first; empty where nobody is known. Changes nothing."""
        return self._holders.get(key, ())

    def note(self, key: bytes, worker: str) -> None:
        """`worker` has been given it just now."""
        held = self._holders.get(key, ())
        if not held or held[0] != worker:
            self._holders[key] = (worker, *(name for name in held if name != worker))[:_MAX_HOLDERS]
        self._holders.move_to_end(key)
        if len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def forget(self, key: bytes, worker: str) -> None:
        """`worker` does not have it after all."""
        left = tuple(name for name in self._holders.get(key, ()) if name != worker)
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)

    def forget_worker(self, worker: str) -> None:
        """`worker` has nothing any more. Looks at every key, so for rare events."""
        for key in [key for key, held in self._holders.items() if worker in held]:
            self.forget(key, worker)
