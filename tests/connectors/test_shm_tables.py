"""The arena's tables: nonsense in them, their accounts, and what happens when their lock is not to be had in time."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from connectors.ec.shm_index import TAKEN
from connectors.ec.shm_layout import COMMITTED_OFFSET, STATIC_BYTES, uptime_s
from connectors.ec.shm_locks import ADMIN, LOCK_TIMEOUT_S
from connectors.ec.store import AbandonedError, ItemError, SaveSource, StoreError
from tests.connectors.shm_processes import embeds_of, open_store, read, write
from tests.connectors.support import DEADLINE_S, key
from tests.connectors.test_shm_faults import EMBEDS, poke, sides

MIB = 1 << 20


@pytest.fixture
def arena(shm_folder: Path) -> Path:
    return shm_folder / "arena"


@pytest.mark.parametrize("seed", range(2))
def test_tables_full_of_nonsense_give_no_wrong_tensor_and_mend(arena: Path, seed: int) -> None:
    """The header stands, all else is overwritten, again and again, while items come and go."""
    rng = random.Random(seed)
    store = open_store(arena, 4 * MIB)
    for _ in range(12):
        for n in rng.sample(range(40), 10):
            write(store, n, 1 + 7 * n)
        arena_ = store._arena
        assert arena_ is not None
        begin = rng.randrange(STATIC_BYTES, arena_.geometry.data_offset)
        num_bytes = min(1 << rng.randrange(1, 15), arena_.geometry.data_offset - begin)
        poke(arena, begin, rng.randbytes(num_bytes))
        for n in range(40):
            try:
                found = read(store, n, 1 + 7 * n)
            except ItemError:
                continue
            assert found is None or torch.equal(found, embeds_of(n, 1 + 7 * n))
    store.close()
    with_repair = open_store(arena, 4 * MIB)
    assert with_repair._arena is not None
    for n in range(40):
        write(with_repair, n, 20)
        found = read(with_repair, n, 20)
        assert found is not None
        assert torch.equal(found, embeds_of(n, 20))
    with_repair.close()


def test_a_repair_frees_what_belongs_to_nothing(arena: Path) -> None:
    store = open_store(arena, MIB)
    for n in range(10):
        write(store, n, 5)
    inside = store._arena
    assert inside is not None
    geometry = inside.geometry
    poke(arena, geometry.owners_offset, b"\xff" * 4 * geometry.num_blocks)  # no such slots
    poke(arena, geometry.states_offset, bytes([77]) * 20)  # no such states
    poke(arena, COMMITTED_OFFSET, b"\x01" * 8)  # not its own complement
    with inside.locked() as index:
        index.repair(uptime_s())
        assert index.num_items() == 0
        assert not index._owners.any()
        assert not index._states.any()
    for n in range(32):
        write(store, n, 5)
    assert store.contains([key(n) for n in range(32)]) == [True] * 32
    del index, inside
    store.close()


def test_a_block_that_is_lent_out_is_never_two_items(arena: Path) -> None:
    """Random writes, drops and evictions; after each the tables agree with each other."""
    rng = random.Random(7)
    store = open_store(arena, MIB)
    for _ in range(300):
        n = rng.randrange(30)
        write(store, n, rng.choice((1, 5, 9, 30)))
        assert store._arena is not None
        with store._arena.locked() as index:
            ready = index._ready()
            owned = [set((index._owners == slot + 1).nonzero()[0].tolist()) for slot in ready.tolist()]
            assert [len(blocks) for blocks in owned] == index._claims(ready).tolist()
            assert sum(map(len, owned)) == int((index._owners != 0).sum())
            assert not (index._states == TAKEN).any()
    del index
    store.close()


def test_a_save_whose_time_is_over_does_not_become_visible(arena: Path) -> None:
    store = open_store(arena, MIB)
    write(store, 1, 5)
    was_read = False

    class Late(SaveSource):
        @property
        def data(self) -> memoryview:
            nonlocal was_read
            was_read = True
            return super().data

    with pytest.raises(AbandonedError):
        store.write(key(2), Late(embeds_of(2, 5), lambda: was_read))
    assert was_read
    assert store.contains([key(1), key(2)]) == [True, False]
    assert store._arena is not None
    assert int((store._arena.index._owners != 0).sum()) == 1, "its blocks were not given back"
    store.close()


def test_a_mutex_that_is_not_to_be_had_is_an_error_in_time(arena: Path) -> None:
    first, second = open_store(arena, MIB), open_store(arena, MIB)
    write(first, 1, 5)
    assert first._arena is not None
    with first._arena.locked():
        begin_s = time.monotonic()
        with pytest.raises(StoreError, match="held the arena's lock for 1 s"):
            read(second, 1, 5)
        assert LOCK_TIMEOUT_S <= time.monotonic() - begin_s < DEADLINE_S
        assert second.contains([key(1)]) == [True], "a look-up needs no lock"
    assert read(second, 1, 5) is not None
    first.close()
    second.close()


def test_a_store_that_is_busy_at_the_start_is_no_mistake_of_the_operators(arena: Path) -> None:
    store = open_store(arena, MIB)
    assert store._arena is not None
    store._arena._locks.lock(ADMIN)
    pair = sides(arena)
    store._arena._locks.unlock(ADMIN)
    assert pair.save(key(1), EMBEDS).finished_saving == [key(1)]
    pair.close()
    store.close()
    assert not arena.exists()
