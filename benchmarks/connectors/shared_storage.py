"""The shared-storage store on a memory-backed folder beside bare safetensors.

Saves make a new file each, and so does `save_file`; the files are removed between the timed loops. `load_file` only
maps a file: loaded is what has been copied into the buffer. It is given the file that the store reads.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.connectors.items import NAMESPACE, empty_item, expect_same, key_of, random_item, source_of, targets_in
from benchmarks.connectors.measuring import Comparison, Contender, Row, Settings, measure
from connectors.ec.folder_store import FolderStore

_GOAL = 0.8


def rows(sizes: Sequence[int], settings: Settings) -> Iterator[Row]:
    root = settings.folder / "items"
    root.mkdir()
    store = FolderStore(root, NAMESPACE)
    try:
        for size_bytes in sizes:
            yield from _of_size(size_bytes, store, root, settings.rounds)
    finally:
        store.close()


def _of_size(size_bytes: int, store: FolderStore, root: Path, rounds: int) -> list[Row]:
    item, buffer = random_item(size_bytes), empty_item(size_bytes)
    target = targets_in(buffer)
    numbers = itertools.count(1)
    made: list[Path] = []

    def save() -> None:
        key = key_of(next(numbers))
        store.write(key, source_of(item))
        made.append(Path(store.path_of(key)))

    def save_bare() -> None:
        path = root / f"{next(numbers)}.safetensors"
        save_file({"embeds": item}, path)
        made.append(path)

    @contextlib.contextmanager
    def removing(_turns: int) -> Iterator[None]:
        yield
        for path in made:
            path.unlink()
        made.clear()

    saves = measure(
        size_bytes,
        {"ours": Contender(save, removing), "save_file": Contender(save_bare, removing)},
        [Comparison("shared storage save", "ours", "save_file", _GOAL)],
        rounds,
    )
    key = key_of(0)
    store.write(key, source_of(item))
    path = store.path_of(key)

    def load() -> None:
        store.read(key, target())

    def load_bare() -> torch.Tensor:
        return buffer.copy_(load_file(path)["embeds"])

    ways: list[Callable[[], object]] = [load, load_bare]
    for way in ways:
        way()
        expect_same("a load from shared storage", buffer, item)
    loads = measure(
        size_bytes,
        {"ours": Contender(load), "load_file + copy_": Contender(load_bare)},
        [Comparison("shared storage load", "ours", "load_file + copy_", _GOAL)],
        rounds,
    )
    Path(path).unlink()
    return saves + loads
