"""ECSharedMemoryConnector at its end, and at the end of the memory that there is: nothing is left, nobody dies."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from connectors.ec.base import ECSide
from connectors.ec.shared_memory import ECSharedMemoryConnector
from connectors.ec.shm_store import SharedMemoryStore
from core.errors import ConfigError
from tests.connectors.shm_processes import open_store, read, write
from tests.connectors.support import ECSides, key, random_bits, same_bits
from tests.connectors.test_shm import sides

MIB = 1 << 20
Closing = Callable[[ECSides], ECSides]


@pytest.fixture
def arena(shm_folder: Path) -> Path:
    return shm_folder / "arena"


def open_files() -> list[str]:
    return [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_attaching_and_leaving_many_times_leaves_nothing(arena: Path) -> None:
    for n in range(25):
        first, second = open_store(arena, MIB), open_store(arena, MIB)
        write(first, n, 3)
        assert read(second, n, 3) is not None
        first.close()
        assert arena.exists()
        assert read(second, n, 3) is not None, "the item went with its writer"
        second.close()
        second.close()
        assert list(arena.parent.iterdir()) == []
    gc.collect()
    assert mappings(arena) == 0
    assert not [name for name in open_files() if str(arena.parent) in name]


def test_of_those_who_leave_at_the_same_moment_one_removes_the_file(arena: Path) -> None:
    """Were each to see the others still there, nobody would."""
    for _ in range(20):
        stores = [open_store(arena, MIB) for _ in range(6)]
        together = threading.Barrier(len(stores))

        def leave(store: SharedMemoryStore, together: threading.Barrier = together) -> None:
            together.wait()
            store.close()

        threads = [threading.Thread(target=leave, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(arena.parent.iterdir()) == []


def test_a_piece_of_memory_that_somebody_kept_keeps_no_lock(arena: Path) -> None:
    """A stack trace may hold one for long; who closed must not count as one who is there."""
    first, second = open_store(arena, MIB), open_store(arena, MIB)
    write(first, 1, 3)
    assert first._arena is not None
    kept = first._arena.chunk(first._arena.geometry.data_offset, 100)
    first.close()
    second.close()
    assert not arena.exists()
    assert len(bytes(kept)) == 100
    kept.release()


def test_a_connector_closed_in_the_middle_of_its_work_leaves_nothing(arena: Path) -> None:
    rows = 16 * 1024
    pair = sides(arena, capacity_bytes=256 * MIB, width=1024, num_rows=rows)
    embeds = torch.zeros(rows, 1024)
    for n in range(6):
        pair.worker.save_caches(key(n), embeds)
    pair.close()
    gc.collect()
    assert list(arena.parent.iterdir()) == []
    assert mappings(arena) == 0


def test_the_sides_of_an_engine_are_closed_in_any_order(arena: Path) -> None:
    pair = sides(arena)
    config = pair.worker.config
    another = ECSharedMemoryConnector(config, ECSide.WORKER)
    pair.worker.close()
    assert pair.look_up(key(1)) is False
    pair.scheduler.close()
    assert pair.scheduler.has_cache_item(key(1)) in (False, None)
    assert arena.exists()
    another.close()
    assert not arena.exists()


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_what_cannot_fit_is_refused_and_a_default_fits(small_volume: Path, closing: Closing) -> None:
    arena = small_volume / "arena"
    with pytest.raises(ConfigError, match=r"capacity_bytes=\d+: needs \d+ bytes where the file system has \d+ left"):
        sides(arena, capacity_bytes=8 * MIB)
    pair = closing(ECSides(ECSharedMemoryConnector, {"path": str(arena)}))
    assert pair.worker._store._arena is not None  # type: ignore[attr-defined]
    assert pair.worker._store._arena.geometry.capacity_bytes == 4 * MIB  # type: ignore[attr-defined]


def test_a_file_system_that_fills_up_fails_saves_and_kills_nobody(small_volume: Path, closing: Closing) -> None:
    pair = closing(sides(small_volume / "arena", capacity_bytes=7 * MIB, width=1024, num_rows=1024))
    filler = small_volume / "filler"
    filler.write_bytes(bytes(7 * MIB))
    embeds = random_bits(1024, 1024, torch.float32)  # 4 MiB
    for _ in range(5):
        reason = pair.save(key(1), embeds).failed_saving[key(1)]
        assert reason == "the arena cannot grow: its file system is full"
    assert pair.save(key(2), embeds[:64]).finished_saving == [key(2)], "there is room for a small one"
    assert pair.load(key(2), 0, 64).finished_loading == [key(2)]
    filler.unlink()
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert pair.load(key(1), 0, 1024).finished_loading == [key(1)]
    assert same_bits(pair.buffer[:1024], embeds)
