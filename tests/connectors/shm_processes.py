"""Processes that share an arena with the tests. Run by multiprocessing's forkserver, which has imported this module: a
process for each of sixteen workers is a matter of milliseconds then.

What an item must hold follows from its number, so that any reader can tell a wrong one.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from connectors.device_copy import DeviceCopies
from connectors.ec import shm_store
from connectors.ec.shm_store import SharedMemoryStore
from connectors.ec.store import ItemError, LoadTarget, SaveSource
from tests.connectors.support import DEADLINE_S, NAMESPACE, key

WIDTH = 1024
_HOST = DeviceCopies(torch.device("cpu"))


def forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def stop_fork_server() -> None:
    """It would else stay until the end of all tests."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextmanager
def worker(target: Any, *args: Any) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """A process that runs `target(*args, pipe)`, and our end of the pipe; killed at the end if it still runs."""
    context = forks()
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(DEADLINE_S)
        process.close()
        ours.close()


def open_store(path: Path | str, capacity_bytes: int | None = None, **given: Any) -> SharedMemoryStore:
    settings = {"ttl_s": None, "creates": True, **given}
    store = SharedMemoryStore(Path(path), NAMESPACE, capacity_bytes=capacity_bytes, **settings)
    store.open()
    return store


def embeds_of(n: int, rows: int) -> torch.Tensor:
    """`[rows, WIDTH]` float32 that no other number has."""
    return torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) + 100_000_007 * (n + 1)


def write(store: SharedMemoryStore, n: int, rows: int) -> None:
    store.write(key(n), SaveSource(embeds_of(n, rows), lambda: False))


def read(store: SharedMemoryStore, n: int, rows: int) -> torch.Tensor | None:
    """None where the item is not there. Raises what the store raises."""
    embeds = torch.full((rows, WIDTH), float("nan"))
    try:
        store.read(key(n), LoadTarget(embeds, _HOST))
    except ItemError as error:
        if str(error) != "item is not in the store":
            raise
        return None
    return embeds


def write_one(path: str, n: int, rows: int, pipe: Connection) -> None:
    """Write item n, then hold on to the arena until told to go."""
    store = open_store(path)
    write(store, n, rows)
    pipe.send("written")
    pipe.recv()
    store.close()
    pipe.send("closed")


def write_and_read_for_ever(path: str, seed: int, num_keys: int, pipe: Connection) -> None:
    """Until killed, or told to stop: write and read items in random order. Sends, at the end, what was found wrong."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    store = open_store(path)
    pipe.send("begun")
    wrong = []
    while not pipe.poll():
        n = rng.randrange(num_keys)
        rows = 1 + n % 300
        try:
            if rng.random() < 0.5:
                write(store, n, rows)
            else:
                found = read(store, n, rows)
                if found is not None and not torch.equal(found, embeds_of(n, rows)):
                    wrong.append(f"item {n} is another")
        except ItemError as error:
            if "full of items in use" not in str(error):
                wrong.append(f"item {n}: {error}")
    store.close()
    pipe.send(wrong)


def write_items(path: str, seed: int, num_items: int, pipe: Connection) -> None:
    """Write each item once, in an order of one's own."""
    torch.set_num_threads(1)
    store = open_store(path)
    numbers = list(range(num_items))
    random.Random(seed).shuffle(numbers)
    pipe.send("begun")
    pipe.recv()
    for n in numbers:
        write(store, n, 1 + n)
    pipe.send("written")
    pipe.recv()
    store.close()


def read_items(path: str, seed: int, num_items: int, pipe: Connection) -> None:
    """Read until every item was there once, and send which of them were wrong."""
    torch.set_num_threads(1)
    store = open_store(path)
    missing = list(range(num_items))
    random.Random(seed).shuffle(missing)
    pipe.send("begun")
    pipe.recv()
    wrong = []
    while missing:
        n = missing.pop(0)
        found = read(store, n, 1 + n)
        if found is None:
            missing.append(n)
            time.sleep(0.001)  # another process writes it: nothing tells us
        elif not torch.equal(found, embeds_of(n, 1 + n)):
            wrong.append(n)
    pipe.send(wrong)
    pipe.recv()
    store.close()


def stop_in_the_middle_of_a_write(path: str, n: int, rows: int, pipe: Connection) -> None:
    """Copy all of item n into the arena and stop for ever before it is published."""
    store = open_store(path)
    real = shm_store._copy_in

    def copy_and_stop(*args: Any) -> bytes:
        real(*args)
        pipe.send("copied")
        threading.Event().wait()
        return b""

    shm_store._copy_in = copy_and_stop
    store.write(key(n), SaveSource(embeds_of(n, rows), lambda: False))


def stop_in_the_middle_of_a_read(path: str, n: int, rows: int, pipe: Connection) -> None:
    """Begin to read item n and wait with a part of it; go on when told, and send what was read."""
    store = open_store(path)
    embeds = torch.zeros(rows, WIDTH)

    class Slow(LoadTarget):
        def fill(self, offset: int, num_bytes: int, read: Callable[[memoryview], None]) -> memoryview:
            if not offset:
                pipe.send("begun")
                pipe.recv()
            return super().fill(offset, num_bytes, read)

    store.read(key(n), Slow(embeds, _HOST))
    pipe.send(torch.equal(embeds, embeds_of(n, rows)))
    store.close()


def hold_the_mutex(path: str, how: str, pipe: Connection) -> None:
    """Take the arena's mutex, say so, and stop oneself, or sleep until killed, with the mutex in hand."""
    store = open_store(path)
    assert store._arena is not None
    with store._arena.locked():
        pipe.send("held")
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            threading.Event().wait()


def attach(path: str, pipe: Connection) -> None:
    """Open the arena, say so, and leave it when told."""
    store = open_store(path)
    pipe.send("open")
    pipe.recv()
    store.close()
    pipe.send("closed")
