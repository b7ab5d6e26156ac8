"""Producers over a shared folder, each in a process of its own. Run by multiprocessing's spawn."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from connectors.ec.folder_store import FolderStore
from connectors.ec.folder_upkeep import Pace
from connectors.ec.store import SaveSource
from tests.connectors.support import NAMESPACE, key, random_bits

QUICK = Pace(period_s=0.5)


def save_items(root: str, pipe: Connection, numbers: range, shape: tuple[int, int], capacity_bytes: int) -> None:
    """When told to, save an item of random float32 for each number, and say so; go on with the upkeep until told to
    stop, and send the number of items that it removed."""
    torch.set_num_threads(1)
    store = FolderStore(Path(root), NAMESPACE, capacity_bytes=capacity_bytes, pace=QUICK)
    closing = threading.Event()
    upkeep = threading.Thread(target=store.maintain, args=(closing,))
    upkeep.start()
    pipe.send("ready")
    pipe.recv()
    for n in numbers:
        store.write(key(n), SaveSource(random_bits(*shape, torch.float32), lambda: False))
    pipe.send("saved")
    pipe.recv()
    closing.set()
    store.close()
    upkeep.join()
    pipe.send(store.take_counters()["evictions"])


def write_again_and_again(root: str, pipe: Connection, shape: tuple[int, int]) -> None:
    """Write item 1, the same bytes each time, and now and then remove it, for ever; say when it was there first."""
    torch.set_num_threads(1)
    store = FolderStore(Path(root), NAMESPACE)
    embeds = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    while True:
        for _ in range(4):  # the first one writes, the others look whether it is whole
            store.write(key(1), SaveSource(embeds, lambda: False))
        if not pipe.closed:
            pipe.send("written")
            pipe.close()
        Path(store.path_of(key(1))).unlink(missing_ok=True)
