"""Many processes and one arena: all at once, and killed at any moment, in the middle of a read, a write, a change."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from connectors.ec.shm_layout import uptime_s
from connectors.ec.store import ItemError, StoreError
from tests.connectors.shm_processes import (
    attach,
    embeds_of,
    hold_the_mutex,
    open_store,
    read,
    read_items,
    stop_fork_server,
    stop_in_the_middle_of_a_read,
    stop_in_the_middle_of_a_write,
    worker,
    write,
    write_and_read_for_ever,
    write_items,
    write_one,
)
from tests.connectors.support import DEADLINE_S, key

MIB = 1 << 20
START_S = 200.0  # sixteen processes that import torch, on a busy machine


@pytest.fixture(autouse=True, scope="module")
def _fork_server() -> Iterator[None]:
    yield
    stop_fork_server()


@pytest.fixture
def arena(shm_folder: Path) -> Path:
    return shm_folder / "arena"


def test_an_item_of_another_process(arena: Path) -> None:
    store = open_store(arena, 4 * MIB)
    with worker(write_one, str(arena), 7, 100) as (_, pipe):
        assert pipe.poll(START_S)
        assert pipe.recv() == "written"
        found = read(store, 7, 100)
        assert found is not None
        assert torch.equal(found, embeds_of(7, 100))
        store.close()
        assert arena.exists(), "another process still uses it"
        pipe.send("go")
        assert pipe.poll(START_S)
        assert pipe.recv() == "closed"
        assert not arena.exists(), "the last one out is to remove it"


def test_an_arena_of_another_capacity_is_replaced_once_nobody_uses_it(arena: Path) -> None:
    with worker(attach, str(arena)) as (process, pipe):
        assert pipe.poll(START_S)
        process.kill()
        process.join()
    assert arena.exists()
    store = open_store(arena, 2 * MIB)
    assert store._arena is not None
    assert store._arena.geometry.capacity_bytes == 2 * MIB
    store.close()


def test_of_many_that_leave_at_once_one_is_the_last(arena: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(attach, str(arena))) for _ in range(8)]
        for _, pipe in workers:
            assert pipe.poll(START_S)
            pipe.recv()
        for _, pipe in workers:
            pipe.send("go")
        for _, pipe in workers:
            assert pipe.poll(START_S)
            assert pipe.recv() == "closed"
        assert list(arena.parent.iterdir()) == []


def test_eight_writers_and_eight_readers_of_the_same_items(arena: Path) -> None:
    num_items = 30
    store = open_store(arena, 16 * MIB)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker(target, str(arena), seed, num_items))
            for target in (write_items, read_items)
            for seed in range(8)
        ]
        for _, pipe in workers:
            assert pipe.poll(START_S)
            pipe.recv()
        for _, pipe in workers:
            pipe.send("go")
        answers = []
        for _, pipe in workers:
            assert pipe.poll(START_S), "somebody hangs"
            answers.append(pipe.recv())
        assert answers == ["written"] * 8 + [[]] * 8
    assert store.contains([key(n) for n in range(num_items)]) == [True] * num_items
    assert store._arena is not None
    with store._arena.locked() as index:
        index.repair(uptime_s())
        assert index.num_items() == num_items
        blocks = sum(store._arena.geometry.num_blocks_for(embeds_of(n, 1 + n).nbytes) for n in range(num_items))
        assert int((index._owners != 0).sum()) == blocks, "a writer that was not the first kept its blocks"
    del index
    store.close()


def test_processes_killed_at_random_moments_do_no_harm(arena: Path) -> None:
    """The arena is too small for all items, so there is always somebody who evicts. Those who live never see a wrong
    item, and at the end nothing is lost that dead ones held."""
    rng = random.Random(11)
    store = open_store(arena, 4 * MIB)
    num_keys = 40
    with ExitStack() as stack:
        survivor = stack.enter_context(worker(write_and_read_for_ever, str(arena), 0, num_keys))
        assert survivor[1].poll(START_S)
        survivor[1].recv()
        for round_ in range(15):
            with ExitStack() as victims:
                doomed = [
                    victims.enter_context(worker(write_and_read_for_ever, str(arena), 100 * round_ + n, num_keys))
                    for n in range(2)
                ]
                for _, pipe in doomed:
                    assert pipe.poll(START_S)
                    pipe.recv()
                time.sleep(rng.uniform(0.0, 0.03))  # the moment of death is to be any
                for process, _ in doomed:
                    process.kill()
            for n in rng.sample(range(num_keys), 5):
                found = read(store, n, 1 + n % 300)
                assert found is None or torch.equal(found, embeds_of(n, 1 + n % 300))
        survivor[1].send("stop")
        assert survivor[1].poll(START_S)
        assert survivor[1].recv() == []
    write(store, 500, 1024)  # all of the arena: room for it only if nothing dead or pinned is left
    found = read(store, 500, 1024)
    assert found is not None
    assert torch.equal(found, embeds_of(500, 1024))
    assert store._arena is not None
    assert store._arena.index.num_items() == 1
    store.close()
    assert list(arena.parent.iterdir()) == []


def test_what_a_killed_writer_left_half_done_is_never_seen_and_given_back(arena: Path) -> None:
    store = open_store(arena, MIB)
    with worker(stop_in_the_middle_of_a_write, str(arena), 1, 200) as (process, pipe):
        assert pipe.poll(START_S)
        assert pipe.recv() == "copied"
        assert store.contains([key(1)]) == [False]
        assert read(store, 1, 200) is None
        with pytest.raises(ItemError, match="full of items in use"):
            write(store, 2, 200)  # the writer lives: its blocks are its own
        process.kill()
        process.join()
        assert store.contains([key(1)]) == [False]
        write(store, 2, 200)
    assert read(store, 1, 200) is None
    assert read(store, 2, 200) is not None
    assert store.take_counters() == {"evictions": 0}
    store.close()


def test_what_is_being_read_is_not_evicted_from_under_the_reader(arena: Path) -> None:
    store = open_store(arena, MIB)
    write(store, 1, 200)
    with worker(stop_in_the_middle_of_a_read, str(arena), 1, 200) as (_, pipe):
        assert pipe.poll(START_S)
        assert pipe.recv() == "begun"
        for n in range(2, 30):
            with pytest.raises(ItemError, match="full of items in use"):
                write(store, n, 200)
        write(store, 30, 40)  # beside it there is room
        assert store.contains([key(1), key(30)]) == [True, True]
        pipe.send("go on")
        assert pipe.poll(START_S)
        assert pipe.recv() is True
    write(store, 2, 200)
    assert store.contains([key(1), key(2)]) == [False, True]
    store.close()


def test_the_pin_of_a_killed_reader_is_gone_with_it(arena: Path) -> None:
    store = open_store(arena, MIB)
    write(store, 1, 200)
    with worker(stop_in_the_middle_of_a_read, str(arena), 1, 200) as (process, pipe):
        assert pipe.poll(START_S)
        assert pipe.recv() == "begun"
        process.kill()
        process.join()
        write(store, 2, 200)
        assert store.contains([key(1), key(2)]) == [False, True]
    store.close()


def test_an_item_that_is_damaged_or_too_old_while_it_is_read_keeps_its_memory_until_then(arena: Path) -> None:
    store = open_store(arena, MIB)
    write(store, 1, 200)
    with worker(stop_in_the_middle_of_a_read, str(arena), 1, 200) as (_, pipe):
        assert pipe.poll(START_S)
        assert pipe.recv() == "begun"
        assert store._arena is not None
        with store._arena.locked() as index:
            index.drop(int(index._ready()[0]))
        del index
        assert store.contains([key(1)]) == [False]
        with pytest.raises(ItemError, match="full of items in use"):
            write(store, 2, 200)
        pipe.send("go on")
        assert pipe.poll(START_S)
        assert pipe.recv() is True
    write(store, 2, 200)
    store.close()


def test_a_mutex_goes_with_the_process_that_held_it(arena: Path) -> None:
    store = open_store(arena, MIB)
    with worker(hold_the_mutex, str(arena), "sleep") as (process, pipe):
        assert pipe.poll(START_S)
        assert pipe.recv() == "held"
        process.kill()
        process.join()
        write(store, 1, 5)  # which would fail, had it to wait for LOCK_TIMEOUT_S
    store.close()


def test_a_process_that_is_stopped_with_the_mutex_delays_nobody_for_long(arena: Path) -> None:
    store = open_store(arena, MIB)
    write(store, 1, 5)
    with worker(hold_the_mutex, str(arena), "stop") as (process, pipe):
        assert pipe.poll(START_S)
        assert pipe.recv() == "held"
        begin_s = time.monotonic()
        with pytest.raises(StoreError, match="held the arena's lock"):
            write(store, 2, 5)
        store.close()
        assert time.monotonic() - begin_s < DEADLINE_S, "it waited for one that never comes"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
