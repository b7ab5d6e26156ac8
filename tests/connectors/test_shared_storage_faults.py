"""Whatever stands in the store, a load ends as the right tensor or as a reason; it never raises, and others go on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.types import ECRole
from tests.connectors.support import NAMESPACE, ECPair, key, poll_until, random_bits, same_bits
from tests.connectors.test_shared_storage import path_of

Closing = Callable[[ECPair], ECPair]
Spoil = Callable[[Path], None]


def cut(num_bytes: int) -> Spoil:
    def spoil(path: Path) -> None:
        raw = path.read_bytes()
        path.write_bytes(raw[: num_bytes if num_bytes >= 0 else len(raw) + num_bytes])

    return spoil


def flip(offset: int) -> Spoil:
    def spoil(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[offset] ^= 1
        path.write_bytes(raw)

    return spoil


def replace(old: bytes, new: bytes) -> Spoil:
    def spoil(path: Path) -> None:
        raw = path.read_bytes()
        assert old in raw
        assert len(old) == len(new)
        path.write_bytes(raw.replace(old, new))

    return spoil


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def plain_safetensors(path: Path) -> None:
    save_file({"embeds": torch.zeros(5, 6)}, path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (Path.unlink, "not in the store"),
        (cut(-1), "cut short"),
        (cut(100), "cut short"),
        (cut(3), "cut short"),
        (cut(0), "cut short"),
        (grow, "cut short"),
        (flip(-1), "checksum"),
        (flip(-5 * 6 * 4), "checksum"),
        (flip(7), "header"),
        (flip(9), "header"),
        (replace(b'"F32"', b'"F16"'), "dtype"),
        (replace(b'"format_version":"1"', b'"format_version":"2"'), "format version"),
        (replace(NAMESPACE.encode(), NAMESPACE[::-1].encode()), "namespace"),
        (replace(b"[5,6]", b"[6,5]"), "shape"),
        (plain_safetensors, "header"),
        (make_folder, "not a file"),
    ],
)
def test_a_spoilt_item_fails_as_data(tmp_path: Path, closing: Closing, spoil: Spoil, reason: str) -> None:
    pair = closing(ECPair(tmp_path))
    embeds = random_bits(5, 6, torch.float32)
    pair.save(key(1), embeds)
    pair.save(key(2), embeds)
    spoil(path_of(tmp_path, key(1)))

    output = pair.load(key(1), 8, 5)
    assert output.finished_loading == []
    assert list(output.failed_loading) == [key(1)]
    assert reason in output.failed_loading[key(1)]
    assert str(tmp_path) not in output.failed_loading[key(1)]
    assert not pair.buffer[:8].any()
    assert not pair.buffer[13:].any()
    assert pair.worker.take_counters()["breaker_opens"] == 0

    assert pair.load(key(2), 20, 5).finished_loading == [key(2)]
    assert same_bits(pair.buffer[20:25], embeds)


@pytest.mark.parametrize(
    "spoil", [cut(-1), cut(3), flip(-1), flip(9), grow], ids=["cut", "stub", "bit", "json", "long"]
)
def test_a_damaged_item_is_removed_and_can_be_made_again(tmp_path: Path, closing: Closing, spoil: Spoil) -> None:
    consumer = closing(ECPair(tmp_path, ECRole.CONSUMER))
    producer = closing(ECPair(tmp_path, ECRole.PRODUCER))
    embeds = random_bits(5, 6, torch.float32)
    producer.save(key(1), embeds)
    spoil(path_of(tmp_path, key(1)))
    assert consumer.load(key(1), 0, 5).failed_loading
    assert consumer.look_up(key(1)) is False
    assert producer.save(key(1), embeds).finished_saving == [key(1)]
    assert consumer.load(key(1), 0, 5).finished_loading == [key(1)]
    assert same_bits(consumer.buffer[:5], embeds)


def test_a_save_replaces_a_damaged_item(tmp_path: Path, closing: Closing) -> None:
    """Nobody has read it since it was damaged, so nobody has removed it."""
    pair = closing(ECPair(tmp_path))
    embeds = random_bits(5, 6, torch.float32)
    pair.save(key(1), embeds)
    flip(-1)(path_of(tmp_path, key(1)))
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert pair.load(key(1), 0, 5).finished_loading == [key(1)]


def test_namespaces_do_not_see_each_other(tmp_path: Path, closing: Closing) -> None:
    ours = closing(ECPair(tmp_path))
    theirs = closing(ECPair(tmp_path, namespace=NAMESPACE[::-1]))
    theirs.save(key(1), random_bits(5, 6, torch.float32))
    assert ours.look_up(key(1)) is False
    assert ours.load(key(1), 0, 5).failed_loading == {key(1): "item is not in the store"}


def test_a_file_of_another_namespace_with_the_same_folder_is_not_used(tmp_path: Path, closing: Closing) -> None:
    ours = closing(ECPair(tmp_path))
    theirs = closing(ECPair(tmp_path, namespace=NAMESPACE[:16] + "0" * 48))
    theirs.save(key(1), random_bits(5, 6, torch.float32))
    assert "namespace" in ours.load(key(1), 0, 5).failed_loading[key(1)]


def test_a_file_under_another_key_is_not_used(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path))
    pair.save(key(1), random_bits(5, 6, torch.float32))
    path_of(tmp_path, key(1)).rename(path_of(tmp_path, key(2)))
    assert "key" in pair.load(key(2), 0, 5).failed_loading[key(2)]


@pytest.mark.parametrize(("start", "num_rows"), [(0, 4), (0, 6)])
def test_an_order_of_another_shape_fails_and_keeps_the_item(
    tmp_path: Path, closing: Closing, start: int, num_rows: int
) -> None:
    pair = closing(ECPair(tmp_path))
    pair.save(key(1), random_bits(5, 6, torch.float32))
    assert "shape of the item is (5, 6)" in pair.load(key(1), start, num_rows).failed_loading[key(1)]
    assert pair.load(key(1), 0, 5).finished_loading == [key(1)]


def test_an_order_outside_the_buffer_fails(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path))
    pair.save(key(1), random_bits(5, 6, torch.float32))
    assert "not in the encoder buffer" in pair.load(key(1), 30, 5).failed_loading[key(1)]


@pytest.mark.parametrize("bad", ["../../../escape", "", "A" * 64, "0" * 63, "0" * 64 + "\n", "0/" * 32])
def test_what_is_not_a_key_never_becomes_a_path(tmp_path: Path, closing: Closing, bad: str) -> None:
    root = tmp_path / "a" / "b"
    root.parent.mkdir()
    pair = closing(ECPair(root))
    assert pair.look_up(bad) is False
    assert pair.load(bad, 0, 5).failed_loading == {bad: "not an item's key"}
    assert pair.save(bad, random_bits(5, 6, torch.float32)).failed_saving == {bad: "not an item's key"}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_root_that_vanished_is_a_store_that_is_down_until_it_is_back(tmp_path: Path, closing: Closing) -> None:
    root = tmp_path / "store"
    pair = closing(ECPair(root, breaker_failures=1, breaker_cooldown_s=0.01, negative_ttl_s=0))
    embeds = random_bits(5, 6, torch.float32)
    pair.save(key(1), embeds)
    assert pair.look_up(key(1)) is True
    shutil.rmtree(root)
    assert pair.look_up(key(1)) is False
    assert pair.scheduler.take_counters() == {"lookup_failures": 1, "breaker_opens": 1, "evictions": 0}
    for output in (pair.load(key(1), 0, 5).failed_loading, pair.save(key(1), embeds).failed_saving):
        assert list(output) == [key(1)]
        assert "storage folder cannot be reached" in output[key(1)] or "left alone" in output[key(1)]
        poll_until(lambda: not pair.worker._breaker.is_open)
    assert not root.exists(), "an unmounted volume must not come back as a folder of this machine"

    root.mkdir()
    poll_until(lambda: pair.save(key(1), embeds).finished_saving == [key(1)])
    poll_until(lambda: pair.look_up(key(1)))
    assert pair.load(key(1), 0, 5).finished_loading == [key(1)]


def test_a_file_that_cannot_be_opened_holds_up_nothing_beyond_the_limit(tmp_path: Path, closing: Closing) -> None:
    """Opening a pipe waits for its other end, as opening a file does on a file server that does not answer."""
    pair = closing(ECPair(tmp_path, timeout_s=1.0, num_threads=1))
    embeds = random_bits(5, 6, torch.float32)
    pair.save(key(1), embeds)
    pair.save(key(2), embeds)
    path = path_of(tmp_path, key(1))
    path.unlink()
    os.mkfifo(path)
    assert pair.load(key(1), 0, 5).failed_loading == {key(1): "the store took longer than timeout_s=1"}
    assert pair.load(key(2), 0, 5).finished_loading == [key(2)]
    other_end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    poll_until(lambda: pair.worker._jobs._num_stuck == 0)
    os.close(other_end)
    assert same_bits(pair.buffer[:5], embeds)


def test_a_save_that_fails_leaves_no_file(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path))
    path = path_of(tmp_path, key(1))
    path.mkdir(parents=True)  # nothing can be renamed over a folder
    assert "storage" in pair.save(key(1), random_bits(5, 6, torch.float32)).failed_saving[key(1)]
    assert list(path.parent.iterdir()) == [path]


def test_embeddings_of_another_width_are_not_stored(tmp_path: Path, closing: Closing) -> None:
    pair = closing(ECPair(tmp_path))
    assert "does not hold" in pair.save(key(1), random_bits(5, 7, torch.float32)).failed_saving[key(1)]
