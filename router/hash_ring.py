"""Consistent hashing (Karger and others, 1997): who is next on a circle, and how little moves when members change."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from blake3 import blake3

#: Points of each member: its share of the keys is within some 20 % of the mean, and a member that comes or goes moves
#: its own share only.
POINTS = 128
_BYTES = 8


class HashRing:
    """Members by name. Not thread-safe; a change costs `POINTS` insertions, a walk a binary search."""

    def __init__(self) -> None:
        self._positions: list[int] = []  # sorted
        self._owners: list[str] = []  # of the points at those positions
        self._members: set[str] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: str) -> bool:
        return member in self._members

    def add(self, member: str) -> None:
        """Without effect for a member that is there."""
        if member in self._members:
            return
        self._members.add(member)
        for i in range(POINTS):
            position = _position(f"{member}#{i}".encode())
            at = bisect.bisect(self._positions, position)
            self._positions.insert(at, position)
            self._owners.insert(at, member)

    def remove(self, member: str) -> None:
        """Without effect for a member that is not there."""
        if member not in self._members:
            return
        self._members.discard(member)
        kept = [(p, owner) for p, owner in zip(self._positions, self._owners, strict=True) if owner != member]
        self._positions = [position for position, _ in kept]
        self._owners = [owner for _, owner in kept]

    def walk(self, key: bytes) -> Iterator[str]:
        """Every member once, from the key's place onwards. The ring must not change while this runs."""
        num_points, seen = len(self._positions), set[str]()
        start = bisect.bisect(self._positions, _position(key))
        for i in range(num_points):
            owner = self._owners[(start + i) % num_points]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == len(self._members):
                    return


def _position(key: bytes) -> int:
    return int.from_bytes(blake3(key).digest(length=_BYTES), "big")
