"""ECSharedStorageConnector when all is well: bytes, visibility, look-ups, configuration, closing."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from connectors.ec.base import ECConnectorConfig, ECSide
from connectors.ec.folder_store import FolderStore
from connectors.ec.shared_storage import ECSharedStorageConnector
from core.errors import ConfigError
from core.types import ECRole
from tests.connectors.processes import save_one_item, stop_before_rename
from tests.connectors.support import DEADLINE_S, NAMESPACE, ECPair, key, poll_until, random_bits, same_bits

Closing = Callable[[ECPair], ECPair]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def path_of(root: Path, item: str) -> Path:
    return root / NAMESPACE[:16] / item[:2] / f"{item}.safetensors"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (63, 61)])
def test_round_trip_is_bit_for_bit(
    tmp_path: Path, closing: Closing, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    rows, width = shape
    pair = closing(ECPair(tmp_path, dtype=dtype, width=width, num_rows=rows + 3))
    embeds = random_bits(rows, width, dtype)
    saved = pair.save(key(1), embeds)
    assert saved.finished_saving == [key(1)]
    assert saved.bytes_saved == embeds.nbytes
    assert len(saved.seconds_saving) == 1
    assert pair.look_up(key(1)) is True

    loaded = pair.load(key(1), 2, rows)
    assert loaded.finished_loading == [key(1)]
    assert loaded.bytes_loaded == embeds.nbytes
    assert len(loaded.seconds_loading) == 1
    assert same_bits(pair.buffer[2 : 2 + rows], embeds)
    assert not pair.buffer[:2].any()
    assert not pair.buffer[2 + rows :].any()


def test_file_is_an_ordinary_safetensors_file(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path, dtype=torch.bfloat16))
    embeds = random_bits(5, 6, torch.bfloat16)
    pair.save(key(1), embeds)
    path = path_of(tmp_path, key(1))
    assert same_bits(load_file(path)["embeds"], embeds)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["namespace"] == NAMESPACE
    assert metadata["key"] == key(1)
    assert metadata["shape"] == "5x6"
    assert metadata["dtype"] == "BF16"
    assert len(metadata["xxh3_128"]) == 32


def test_a_view_of_the_encoder_buffer_can_be_saved(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path))
    pair.buffer.copy_(random_bits(32, 6, torch.float32))
    pair.save(key(1), pair.buffer[3:9])
    assert path_of(tmp_path, key(1)).stat().st_size < 2048, "the rest of the buffer was stored as well"
    assert pair.load(key(1), 20, 6).finished_loading == [key(1)]
    assert same_bits(pair.buffer[20:26], pair.buffer[3:9])


def test_an_item_of_another_process(tmp_path: Path, closing: Closing) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    writer = spawn.Process(target=save_one_item, args=(str(tmp_path), theirs))
    writer.start()
    pair = closing(ECPair(tmp_path, ECRole.CONSUMER, dtype=torch.bfloat16))
    assert ours.poll(200)
    saved, raw = ours.recv()
    writer.join(DEADLINE_S)
    assert writer.exitcode == 0
    assert saved == [key(1)]
    assert pair.look_up(key(1)) is True
    assert pair.load(key(1), 0, 7).finished_loading == [key(1)]
    assert pair.buffer[:7].view(torch.uint8).numpy().tobytes() == raw


def test_a_killed_writer_leaves_nothing_visible_and_is_swept_later(tmp_path: Path, closing: Closing) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    writer = spawn.Process(target=stop_before_rename, args=(str(tmp_path), theirs))
    writer.start()
    assert ours.poll(200)
    writer.kill()
    writer.join(DEADLINE_S)

    folder = path_of(tmp_path, key(1)).parent
    (left_behind,) = folder.iterdir()
    assert left_behind.name.endswith(".tmp")
    pair = closing(ECPair(tmp_path, ECRole.CONSUMER))
    assert pair.look_up(key(1)) is False

    strangers = folder / ".somebody-else.tmp"
    strangers.touch()
    for old in (left_behind, strangers):
        os.utime(old, (time.time() - 601,) * 2)
    young = folder / f".{key(2)}.{'0' * 16}.tmp"
    young.touch()
    closing(ECPair(tmp_path, ECRole.PRODUCER))
    poll_until(lambda: set(folder.iterdir()) == {strangers, young})


def test_saving_what_is_there_writes_nothing_but_makes_it_young_again(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path))
    embeds = random_bits(5, 6, torch.float32)
    pair.save(key(1), embeds)
    os.utime(path_of(tmp_path, key(1)), (1e9, 1e9))
    before = path_of(tmp_path, key(1)).stat()
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    after = path_of(tmp_path, key(1)).stat()
    assert after.st_ino == before.st_ino
    assert after.st_mtime == pytest.approx(time.time(), abs=DEADLINE_S)


def test_look_ups_do_no_io_on_the_callers_thread(
    tmp_path: Path, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = closing(ECPair(tmp_path))
    threads: list[int] = []
    real_stat = os.stat

    def recording_stat(path: str | Path, **kwargs: bool) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            threads.append(threading.get_ident())
        return real_stat(path, **kwargs)

    monkeypatch.setattr(os, "stat", recording_stat)
    assert pair.look_up(key(1)) is False
    assert threads
    assert threading.get_ident() not in threads


def test_a_store_that_hangs_blocks_neither_look_ups_nor_close(
    tmp_path: Path, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = threading.Event(), threading.Event()

    def hang(store: FolderStore, keys: list[str]) -> list[bool]:
        asked.set()
        return [answer.wait(DEADLINE_S)] * len(keys)

    monkeypatch.setattr(FolderStore, "contains", hang)
    pair = closing(ECPair(tmp_path))
    assert pair.scheduler.has_cache_item(key(1)) is None
    assert asked.wait(DEADLINE_S)
    begin_s = time.monotonic()
    assert [pair.scheduler.has_cache_item(key(n)) for n in range(100)] == [None] * 100
    pair.scheduler.close()
    assert time.monotonic() - begin_s < DEADLINE_S / 2
    answer.set()
    assert pair.scheduler._lookups is not None
    pair.scheduler._lookups._thread.join(DEADLINE_S)


def test_a_consumer_believes_a_find_until_a_load_fails(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path, ECRole.CONSUMER, negative_ttl_s=0))
    writer = closing(ECPair(tmp_path, ECRole.PRODUCER))
    writer.save(key(1), random_bits(5, 6, torch.float32))
    assert pair.look_up(key(1)) is True
    path_of(tmp_path, key(1)).unlink()
    assert pair.scheduler.has_cache_item(key(1)) is True
    assert pair.load(key(1), 0, 5).failed_loading == {key(1): "item is not in the store"}
    assert pair.look_up(key(1)) is False


def test_a_producer_looks_again(tmp_path: Path, closing: Closing) -> None:
    """Else it answers "cached" for ever for an item that it is asked to make again because it vanished."""
    pair = closing(ECPair(tmp_path, ECRole.PRODUCER, negative_ttl_s=0))
    pair.save(key(1), random_bits(5, 6, torch.float32))
    assert pair.look_up(key(1)) is True
    path_of(tmp_path, key(1)).unlink()
    assert pair.look_up(key(1)) is False


def test_a_save_ends_the_belief_that_nothing_is_there(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path, negative_ttl_s=60))
    assert pair.look_up(key(1)) is False
    pair.save(key(1), random_bits(5, 6, torch.float32))
    assert pair.look_up(key(1)) is True


def test_the_folder_is_made_where_its_parent_exists(tmp_path: Path, closing: Closing) -> None:
    closing(ECPair(tmp_path / "new"))
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"shared_storage_path": ""}, "shared_storage_path"),
        ({"shared_storage_path": 3}, "shared_storage_path"),
        ({"shared_storage_path": "/nowhere-at-all/below"}, "shared_storage_path"),
        ({"shared_storage_path": "nul\0byte"}, "shared_storage_path"),
        ({"shared_storage_path": __file__}, "shared_storage_path"),
        ({"shared_storage_paht": "x"}, "shared_storage_paht"),
        ({"capacity_bytes": 4095}, "capacity_bytes"),
        ({"capacity_bytes": 1 << 59}, "capacity_bytes"),  # no file system here is so large
        ({"capacity_bytes": "1 GB"}, "capacity_bytes"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": True}, "ttl_s"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": "two"}, "num_threads"),
        ({"negative_ttl_s": -1}, "negative_ttl_s"),
        ({"negative_ttl_s": float("nan")}, "negative_ttl_s"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(tmp_path: Path, extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ECPair(**{"root": tmp_path, **extra})  # type: ignore[arg-type]
    assert caught.value.name == f"--ec-connector-extra-config {named}"
    assert repr(extra[named]) in str(caught.value)


def test_a_missing_folder_setting_is_named() -> None:
    config = ECConnectorConfig(ECRole.BOTH, NAMESPACE, torch.float32, 6, {}, lambda: None)
    with pytest.raises(ConfigError, match=r"shared_storage_path.*required"):
        ECSharedStorageConnector(config, ECSide.SCHEDULER)


def test_a_folder_that_cannot_be_written_is_refused_to_producers_only(
    tmp_path: Path, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so the operating system's answer is stood in for.
    real_access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real_access(path, mode))
    with pytest.raises(ConfigError, match="ec_producer must be able to write"):
        ECPair(tmp_path, ECRole.PRODUCER)
    closing(ECPair(tmp_path, ECRole.CONSUMER))
