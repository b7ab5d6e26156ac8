"""The shared-memory store beside a memcpy: into the buffer and out of it.

*verified* is the store as it is. *bare* is the same code with a checksum that costs nothing. Neither goes round a cache
that the other one uses: as many places as the arena has, one after the other, make up what the memcpy reads and writes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from unittest import mock

from benchmarks.connectors.items import (
    NAMESPACE,
    empty_item,
    expect_same,
    key_of,
    memcpy,
    random_item,
    source_of,
    targets_in,
)
from benchmarks.connectors.measuring import Comparison, Contender, Row, Settings, as_is, measure
from connectors.ec import shm_store
from connectors.ec.shm_store import SharedMemoryStore

_BARE_GOAL, _VERIFIED_GOAL = 0.8, 0.5
_ARENA_BYTES = 8 << 20  # for items smaller than that; of larger ones, two


class _NoChecksum:
    """Stands in for module xxhash."""

    @staticmethod
    def xxh3_128() -> type[_NoChecksum]:
        return _NoChecksum

    @staticmethod
    def update(_data: object) -> None:
        pass

    @staticmethod
    def digest() -> bytes:
        return bytes(16)


@contextlib.contextmanager
def _bare(_turns: int) -> Iterator[None]:
    with mock.patch.object(shm_store, "xxhash", _NoChecksum):
        yield


def rows(sizes: Sequence[int], settings: Settings) -> Iterator[Row]:
    for size_bytes in sizes:
        yield from _of_size(size_bytes, settings)


def _of_size(size_bytes: int, settings: Settings) -> list[Row]:
    places = max(2, min(16, _ARENA_BYTES // size_bytes))
    capacity_bytes = max(1 << 20, places * size_bytes)
    with contextlib.ExitStack() as stack:

        def arena(name: str) -> SharedMemoryStore:
            path = settings.folder / name
            store = SharedMemoryStore(path, NAMESPACE, capacity_bytes=capacity_bytes, ttl_s=None, creates=True)
            stack.callback(store.close)
            return store

        return _measure(size_bytes, places, arena("bare"), arena("verified"), settings.rounds)


def _measure(
    size_bytes: int, places: int, bare: SharedMemoryStore, verified: SharedMemoryStore, rounds: int
) -> list[Row]:
    item, buffer = random_item(size_bytes), empty_item(size_bytes)
    target = targets_in(buffer)
    pool = item.repeat(places, 1, 1)  # [places, num_embeds, width]
    there = [key_of(n) for n in range(places)]
    for key in there:
        verified.write(key, source_of(item))
        with _bare(1):
            bare.write(key, source_of(item))

    def reading(store: SharedMemoryStore) -> Contender:
        keys = itertools.cycle(there)
        work = Contender(lambda: store.read(next(keys), target()), _bare if store is bare else as_is)
        with work.around(1):
            work.work()
        expect_same("a load from shared memory", buffer, item)
        return work

    def writing(store: SharedMemoryStore) -> Contender:
        keys = map(key_of, itertools.count(places))  # each anew: what is there already is not written again
        return Contender(lambda: store.write(next(keys), source_of(item)), _bare if store is bare else as_is)

    copies_in = itertools.cycle([memcpy(buffer, place) for place in pool])
    copies_out = itertools.cycle([memcpy(place, item) for place in pool])
    loads = measure(
        size_bytes,
        {
            "bare": reading(bare),
            "verified": reading(verified),
            "memcpy": Contender(lambda: next(copies_in)()),
        },
        [
            Comparison("shared memory load, bare", "bare", "memcpy", _BARE_GOAL),
            Comparison("shared memory load, verified", "verified", "memcpy", _VERIFIED_GOAL),
        ],
        rounds,
    )
    saves = measure(
        size_bytes,
        {
            "bare": writing(bare),
            "verified": writing(verified),
            "memcpy": Contender(lambda: next(copies_out)()),
        },
        [
            Comparison("shared memory save, bare", "bare", "memcpy", _BARE_GOAL),
            Comparison("shared memory save, verified", "verified", "memcpy", _VERIFIED_GOAL),
        ],
        rounds,
    )
    return loads + saves
