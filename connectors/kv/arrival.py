"""The body of a message on its way: where it goes, and whether it is what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import xxhash

from connectors.kv.stream import advance

_SCRATCH_BYTES = 256 << 10


class Arrival:
    """`num_bytes` that go, in order, to the places of one grain after the other. `checksums`: XXH3-128 of each grain,
    taken as soon as it is there, while a processor's cache still holds it. `land` is called where all of it is
    right."""

    def __init__(
        self,
        num_bytes: int,
        grains: Iterator[list[memoryview]],
        checksums: Sequence[bytes],
        land: Callable[[], None] | None = None,
    ) -> None:
        self.num_missing = num_bytes
        self._grains = grains
        self._expected = iter(checksums)
        self._land = land
        self._is_right = True
        self._grain = next(grains, [])  # the one that is being received
        self._left = list(self._grain)  # what is missing of it

    def places(self) -> list[memoryview]:
        """Where the next bytes go."""
        return self._left

    def received(self, num_bytes: int) -> None:
        """So many bytes are there now."""
        advance(self._left, num_bytes)
        self.num_missing -= num_bytes
        if not self._left:
            hasher = xxhash.xxh3_128()
            for place in self._grain:
                hasher.update(place)
            self._is_right &= hasher.digest() == next(self._expected, b"")
            self._grain = next(self._grains, [])
            self._left = list(self._grain)

    def end(self) -> bool:
        """All of it has come: whether it is right, and where it was to go."""
        is_right = self._is_right and next(self._expected, None) is None
        if is_right and self._land is not None:
            self._land()
        return is_right


class Waste:
    """So many bytes that nobody wants any more."""

    def __init__(self, num_bytes: int) -> None:
        self.num_missing = num_bytes
        self._scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))

    def places(self) -> list[memoryview]:
        return [self._scratch[: self.num_missing]]

    def received(self, num_bytes: int) -> None:
        self.num_missing -= num_bytes

    def end(self) -> bool:
        return True
