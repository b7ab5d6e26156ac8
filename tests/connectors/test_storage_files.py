"""The files of the shared folder: format, modes, whole or absent whatever happens, and file systems that fail."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from connectors.device_copy import DeviceCopies
from connectors.ec.folder_store import FolderStore
from connectors.ec.item_file import DTYPES
from connectors.ec.store import AbandonedError, ItemError, LoadTarget, SaveSource, StoreError, bytes_of
from core.types import ECRole
from tests.connectors.storage_processes import write_again_and_again
from tests.connectors.support import DEADLINE_S, NAMESPACE, ECPair, key, poll_until, random_bits, same_bits
from tests.connectors.test_shared_storage import path_of
from tests.e2e.mounts import Mounted, can_mount

Closing = Callable[[ECPair], ECPair]

needs_mount = pytest.mark.skipif(not can_mount(), reason="this process may not mount a file system")
MIB_ROWS = 256  # of 1024 float32: an item of 1 MiB


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Mounted]:
    folder = tmp_path / "volume"
    folder.mkdir()
    with Mounted(folder, size_bytes=8 << 20) as mounted:
        yield mounted


def make(root: Path, role: ECRole = ECRole.BOTH, **extra: object) -> ECPair:
    given = {"breaker_failures": 1000, "negative_ttl_s": 0, **extra}
    return ECPair(root, role, width=1024, num_rows=2 * MIB_ROWS, **given)


def target_of(tensor: torch.Tensor) -> LoadTarget:
    return LoadTarget(tensor, DeviceCopies(tensor.device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (1, 1 << 20), (1027, 1021)])
def test_the_library_reads_what_we_write_and_we_read_what_it_writes(
    tmp_path: Path, dtype: torch.dtype, rows: int, width: int
) -> None:
    store = FolderStore(tmp_path, NAMESPACE)
    embeds = random_bits(rows, width, dtype)
    store.write(key(1), SaveSource(embeds, lambda: False))
    path = Path(store.path_of(key(1)))
    assert same_bits(load_file(path)["embeds"], embeds)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert file.get_slice("embeds").get_dtype() == DTYPES[dtype]
    assert metadata == {
        "format_version": "1",
        "namespace": NAMESPACE,
        "key": key(1),
        "shape": f"{rows}x{width}",
        "dtype": DTYPES[dtype],
        "xxh3_128": xxhash.xxh3_128_hexdigest(bytes_of(embeds)),
    }
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert header_bytes % 8 == 0, "the payload is to be aligned"

    save_file({"embeds": embeds}, path, metadata)
    loaded = torch.zeros_like(embeds)
    store.read(key(1), target_of(loaded))
    assert same_bits(loaded, embeds)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Items are read in one way from memory-backed folders and in another from all others."""
    memory = Path("/dev/shm")
    if request.param == "disk":
        if FolderStore(tmp_path, NAMESPACE)._is_in_memory:
            pytest.skip("temporary files are in memory here")
        yield tmp_path
        return
    if not memory.is_dir():
        pytest.skip("no memory-backed folder")
    with tempfile.TemporaryDirectory(dir=memory) as path:
        assert FolderStore(Path(path), NAMESPACE)._is_in_memory
        yield Path(path)


def test_an_item_of_several_chunks_is_read_whole_or_refused(folder: Path) -> None:
    store, embeds = FolderStore(folder, NAMESPACE), random_bits(1027, 1021, torch.float32)
    store.write(key(1), SaveSource(embeds, lambda: False))
    loaded = torch.zeros_like(embeds)
    store.read(key(1), target_of(loaded))
    assert same_bits(loaded, embeds)

    path = Path(store.path_of(key(1)))
    raw = bytearray(path.read_bytes())
    for offset in (len(raw) - 1, len(raw) // 2, 700):
        raw[offset] ^= 1
        path.write_bytes(raw)
        with pytest.raises(ItemError, match="checksum"):
            store.read(key(1), target_of(loaded))
        raw[offset] ^= 1
    path.write_bytes(raw[:-1])
    with pytest.raises(ItemError, match="cut short"):
        store.read(key(1), target_of(loaded))


def test_a_load_that_was_given_up_writes_nothing(folder: Path) -> None:
    store, embeds = FolderStore(folder, NAMESPACE), random_bits(1027, 1021, torch.float32)
    store.write(key(1), SaveSource(embeds, lambda: False))
    rows = torch.zeros_like(embeds)
    target = target_of(rows)
    target.abandon()
    with pytest.raises(AbandonedError):
        store.read(key(1), target)
    assert not rows.view(torch.uint8).any()


def test_files_and_folders_have_what_the_umask_leaves(tmp_path: Path) -> None:
    """Encoders and consumers may run as different users of one group."""
    before = os.umask(0o027)
    try:
        store = FolderStore(tmp_path, NAMESPACE)
        store.write(key(1), SaveSource(torch.zeros(2, 3), lambda: False))
    finally:
        os.umask(before)
    path = Path(store.path_of(key(1)))
    assert path.stat().st_mode & 0o777 == 0o640
    assert [folder.stat().st_mode & 0o777 for folder in path.parents[:2]] == [0o750, 0o750]


def test_a_reader_sees_all_of_an_item_or_none(tmp_path: Path) -> None:
    """While another process writes and removes it without end, and is killed in the middle."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    shape = (300, 1024)
    writer = spawn.Process(target=write_again_and_again, args=(str(tmp_path), theirs, shape))
    writer.start()
    assert ours.poll(200)
    store, expected = FolderStore(tmp_path, NAMESPACE), torch.arange(shape[0] * shape[1]).float().view(shape)
    outcomes = {"read": 0, "absent": 0}

    def look() -> bool:
        loaded, reason = torch.zeros(shape), ""
        try:
            store.read(key(1), target_of(loaded))
        except ItemError as error:
            reason = str(error)
        assert reason in ("", "item is not in the store")
        assert reason or torch.equal(loaded, expected)
        outcomes["absent" if reason else "read"] += 1
        return min(outcomes.values()) >= 20

    poll_until(look)
    writer.kill()
    writer.join(DEADLINE_S)
    look()
    store.write(key(1), SaveSource(expected, lambda: False))
    before = outcomes["read"]
    look()
    assert outcomes["read"] == before + 1


def test_closing_in_the_middle_of_saves_leaves_no_file_behind(tmp_path: Path, closing: Closing) -> None:
    pair = ECPair(tmp_path, width=1024, num_rows=16 * MIB_ROWS)
    for n in range(8):
        pair.worker.save_caches(key(n), pair.buffer)
    closing(pair).close()
    assert list(tmp_path.rglob("*.tmp")) == []


def test_an_item_of_a_newer_format_is_left_for_those_who_know_it(tmp_path: Path, closing: Closing) -> None:
    pair = closing(make(tmp_path))
    path = path_of(tmp_path, key(1))
    path.parent.mkdir(parents=True)
    save_file({"tiles": torch.zeros(4, 4), "order": torch.zeros(2)}, path, {"format_version": "2", "colour": "blue"})
    assert pair.load(key(1), 0, 1).failed_loading == {key(1): "format version of the item is '2', not '1'"}
    assert path.exists()


@needs_mount
def test_a_full_file_system_fails_the_save_and_makes_room_for_the_next(volume: Mounted, closing: Closing) -> None:
    pair = closing(make(volume.folder, capacity_bytes=8 << 20))
    embeds = random_bits(MIB_ROWS, 1024, torch.float32)
    (volume.folder / "somebody-elses").write_bytes(b"x" * (3 << 20))
    failed: dict[str, str] = {}
    n = 0
    while not failed:
        n += 1
        failed = pair.save(key(n), embeds).failed_saving
    assert failed == {key(n): "storage: No space left on device"}
    assert 4 <= n <= 6
    assert list(volume.folder.rglob("*.tmp")) == []
    poll_until(lambda: pair.save(key(n), embeds).finished_saving == [key(n)])
    assert pair.load(key(n), 0, MIB_ROWS).finished_loading == [key(n)]
    assert same_bits(pair.buffer[:MIB_ROWS], embeds)
    assert pair.worker.take_counters()["evictions"] > 0
    assert not all(pair.look_up(key(older)) for older in range(1, n)), "older ones gave way"


@needs_mount
def test_a_file_system_that_is_full_of_other_things_fails_saves_and_nothing_else(
    volume: Mounted, closing: Closing
) -> None:
    pair = closing(make(volume.folder))
    with pytest.raises(OSError, match="No space left"):
        (volume.folder / "somebody-elses").write_bytes(b"x" * (9 << 20))
    reason = pair.save(key(1), random_bits(MIB_ROWS, 1024, torch.float32)).failed_saving[key(1)]
    assert reason == "storage: No space left on device"
    assert pair.look_up(key(1)) is False
    assert pair.scheduler.take_counters()["lookup_failures"] == 0


@needs_mount
def test_a_read_only_mount_serves_loads(volume: Mounted, closing: Closing) -> None:
    pair = closing(make(volume.folder))
    embeds = random_bits(MIB_ROWS, 1024, torch.float32)
    pair.save(key(1), embeds)
    volume.set_read_only(True)
    assert pair.look_up(key(1)) is True
    assert pair.load(key(1), 0, MIB_ROWS).finished_loading == [key(1)]
    assert pair.save(key(2), embeds).failed_saving == {key(2): "storage: Read-only file system"}
    volume.set_read_only(False)
    assert pair.save(key(2), embeds).finished_saving == [key(2)]


@needs_mount
def test_an_unmounted_volume_is_a_store_that_is_down_until_it_is_mounted_again(
    volume: Mounted, closing: Closing
) -> None:
    """The folder is still there, but what is saved now would end on this machine's own disk."""
    pair = closing(make(volume.folder))
    embeds = random_bits(MIB_ROWS, 1024, torch.float32)
    pair.save(key(1), embeds)
    volume.unmount()
    gone = "the volume of the storage folder is not mounted any more"
    assert pair.look_up(key(1)) is False
    assert pair.scheduler.take_counters()["lookup_failures"] == 1
    assert pair.load(key(1), 0, MIB_ROWS).failed_loading == {key(1): gone}
    assert pair.save(key(1), embeds).failed_saving == {key(1): gone}
    assert list(volume.folder.iterdir()) == []
    volume.mount()
    assert pair.look_up(key(1)) is False
    assert pair.scheduler.take_counters()["lookup_failures"] == 0
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert pair.load(key(1), 0, MIB_ROWS).finished_loading == [key(1)]


def test_what_another_machine_removed_while_we_read_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No NFS here: its answer to a read of a file that was removed on another machine is stood in for.
    store = FolderStore(tmp_path, NAMESPACE)
    store.write(key(1), SaveSource(torch.zeros(2, 3), lambda: False))

    def stale(*_args: object) -> int:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "preadv", stale)
    with pytest.raises(ItemError, match="removed while it was read"):
        store.read(key(1), target_of(torch.zeros(2, 3)))
    monkeypatch.undo()
    tmp_path.rename(tmp_path.parent / "elsewhere")
    with pytest.raises(StoreError, match="cannot be reached"):
        store.read(key(1), target_of(torch.zeros(2, 3)))
    (tmp_path.parent / "elsewhere").rename(tmp_path)
