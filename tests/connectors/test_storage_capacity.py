"""The shared folder is bounded by bytes and age, what is used stays, and several producers keep it so together."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from connectors.ec.base import ECConnectorConfig, ECSide
from connectors.ec.folder_store import FolderStore
from connectors.ec.folder_upkeep import Pace
from connectors.ec.item_file import write_item_file
from connectors.ec.shared_storage import ECSharedStorageConnector
from connectors.ec.store import SaveSource
from core.types import ECRole
from tests.connectors.storage_processes import QUICK, save_items
from tests.connectors.support import DEADLINE_S, NAMESPACE, ECPair, key, poll_until, random_bits
from tests.connectors.test_shared_storage import path_of

Closing = Callable[[ECPair], ECPair]

ROWS, WIDTH = 32, 64  # 8 KiB an item


def _file_bytes() -> int:
    with open(os.memfd_create("item"), "wb") as file:
        return write_item_file(file.fileno(), torch.zeros(ROWS, WIDTH), NAMESPACE, key(1), lambda: None)


FILE_BYTES = _file_bytes()


def held(root: Path) -> list[str]:
    return sorted(path.stem for path in root.rglob("*.safetensors"))


def held_bytes(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(f"{folder}/{name}").st_size
            except FileNotFoundError:  # evicted in between
                continue
    return total


def wait_for_evictions(pair: ECPair, expected: Callable[[], int]) -> None:
    """They are counted a moment after their files are gone. Returns as soon as so many are, and fails beyond."""
    evictions = 0

    def are_counted() -> bool:
        nonlocal evictions
        evictions += pair.worker.take_counters()["evictions"]
        assert evictions <= expected()
        return evictions == expected()

    poll_until(are_counted)


def make(root: Path, role: ECRole = ECRole.BOTH, **extra: object) -> ECPair:
    return ECPair(root, role, width=WIDTH, num_rows=2 * ROWS, **extra)


def save(pair: ECPair, *numbers: int) -> None:
    for n in numbers:
        assert pair.save(key(n), random_bits(ROWS, WIDTH, torch.float32)).finished_saving == [key(n)]


def age(root: Path, n: int, seconds: float) -> None:
    """As if nobody had used it since."""
    os.utime(path_of(root, key(n)), (time.time() - seconds,) * 2)


def test_what_was_used_least_recently_goes_first(tmp_path: Path, closing: Closing) -> None:
    pair = closing(make(tmp_path, capacity_bytes=4 * FILE_BYTES))
    save(pair, 1, 2, 3, 4)
    for n in (1, 2, 3, 4):
        age(tmp_path, n, 100 - n)
    assert pair.load(key(1), 0, ROWS).finished_loading == [key(1)]
    save(pair, 5)
    wait_for_evictions(pair, lambda: 1)
    assert held(tmp_path) == [key(1), key(3), key(4), key(5)]
    assert pair.worker.take_counters()["evictions"] == 0
    poll_until(lambda: pair.look_up(key(2)) is False)
    assert pair.load(key(2), 0, ROWS).failed_loading == {key(2): "item is not in the store"}


def test_what_an_encoder_is_asked_for_counts_as_used(tmp_path: Path, closing: Closing) -> None:
    """The consumers hold it in their buffers and do not load it again, however popular it is."""
    pair = closing(make(tmp_path, ECRole.PRODUCER, capacity_bytes=4 * FILE_BYTES))
    save(pair, 1, 2, 3, 4)
    for n in (1, 2, 3, 4):
        age(tmp_path, n, 100 - n)
    assert pair.look_up(key(1)) is True
    save(pair, 5)
    poll_until(lambda: held_bytes(tmp_path) <= 4 * FILE_BYTES)
    assert held(tmp_path) == [key(1), key(3), key(4), key(5)]


def test_the_capacity_is_kept_while_much_is_saved(tmp_path: Path, closing: Closing) -> None:
    pair = closing(make(tmp_path, capacity_bytes=10 * FILE_BYTES))
    save(pair, *range(100))
    begin_s = time.monotonic()
    poll_until(lambda: held_bytes(tmp_path) <= 10 * FILE_BYTES)
    assert time.monotonic() - begin_s < Pace().period_s / 2, "saves count at once, not with the next walk"
    assert len(held(tmp_path)) >= 8, "no more is removed than must be"
    # Some share one tick of the file system's clock, and which of them goes first is not said.
    assert min(held(tmp_path)) >= key(70), "what was saved last is kept"
    wait_for_evictions(pair, lambda: 100 - len(held(tmp_path)))


def test_items_of_weights_that_nobody_serves_any_more_go_too(tmp_path: Path, closing: Closing) -> None:
    old = closing(make(tmp_path, namespace=NAMESPACE[::-1]))
    save(old, 1, 2, 3)
    old.close()
    pair = closing(make(tmp_path, capacity_bytes=4 * FILE_BYTES))
    save(pair, 4, 5, 6, 7)
    poll_until(lambda: held(tmp_path) == [key(n) for n in (4, 5, 6, 7)])


def test_an_item_larger_than_the_capacity_is_refused_by_name(tmp_path: Path, closing: Closing) -> None:
    pair = closing(make(tmp_path, capacity_bytes=4096))
    output = pair.save(key(1), random_bits(ROWS, WIDTH, torch.float32))
    assert output.failed_saving == {key(1): "an item of 8192 bytes does not fit into capacity_bytes=4096"}
    assert held(tmp_path) == []
    assert pair.worker.take_counters()["breaker_opens"] == 0
    assert pair.save(key(2), random_bits(1, WIDTH, torch.float32)).finished_saving == [key(2)]


def test_without_a_capacity_half_of_the_file_system_is_used_at_most(tmp_path: Path) -> None:
    config = ECConnectorConfig(
        ECRole.CONSUMER, NAMESPACE, torch.float32, WIDTH, {"shared_storage_path": str(tmp_path)}, lambda: None
    )
    connector = ECSharedStorageConnector(config, ECSide.WORKER)
    size = os.statvfs(tmp_path)
    assert connector._store._capacity_bytes == min(32 << 30, size.f_blocks * size.f_frsize // 2)  # type: ignore[attr-defined]
    connector.close()


def test_an_expired_item_is_absent_before_anybody_has_removed_it(tmp_path: Path, closing: Closing) -> None:
    save(closing(make(tmp_path)), 1, 2)
    consumer = closing(make(tmp_path, ECRole.CONSUMER, ttl_s=50, negative_ttl_s=0))
    age(tmp_path, 1, 51)
    age(tmp_path, 2, 49)
    assert [consumer.look_up(key(n)) for n in (1, 2)] == [False, True]
    assert consumer.load(key(1), 0, ROWS).failed_loading == {key(1): "item was not used for ttl_s=50"}
    assert held(tmp_path) == [key(1), key(2)], "it is the producers who remove"

    assert consumer.load(key(2), 0, ROWS).finished_loading == [key(2)]
    assert time.time() - path_of(tmp_path, key(2)).stat().st_mtime < DEADLINE_S, "a load begins its time anew"


def test_a_producer_removes_what_expired(tmp_path: Path, closing: Closing) -> None:
    save(closing(make(tmp_path)), 1, 2)
    age(tmp_path, 1, 51)
    producer = closing(make(tmp_path, ECRole.PRODUCER, ttl_s=50))
    wait_for_evictions(producer, lambda: 1)
    assert held(tmp_path) == [key(2)]


def test_looking_up_does_not_keep_an_item_from_expiring(tmp_path: Path, closing: Closing) -> None:
    pair = closing(make(tmp_path, ttl_s=1, negative_ttl_s=0))
    save(pair, 1)
    begin_s = time.monotonic()
    poll_until(lambda: not pair.look_up(key(1)))
    assert 0.9 < time.monotonic() - begin_s < 5
    save(pair, 1)
    assert pair.look_up(key(1)) is True
    assert pair.load(key(1), 0, ROWS).finished_loading == [key(1)]


def test_a_look_up_notes_down_use_beside_age(tmp_path: Path, closing: Closing) -> None:
    pair = closing(make(tmp_path, ttl_s=50, negative_ttl_s=0))
    save(pair, 1)
    age(tmp_path, 1, 30)
    assert pair.look_up(key(1)) is True
    status = path_of(tmp_path, key(1)).stat()
    assert time.time() - status.st_atime < DEADLINE_S
    assert time.time() - status.st_mtime > 29


def test_an_expired_item_is_saved_anew(tmp_path: Path, closing: Closing) -> None:
    save(closing(make(tmp_path)), 1)
    consumer = closing(make(tmp_path, ECRole.CONSUMER, ttl_s=50))
    age(tmp_path, 1, 51)
    assert consumer.look_up(key(1)) is False
    save(closing(make(tmp_path, ECRole.PRODUCER)), 1)
    assert consumer.load(key(1), 0, ROWS).finished_loading == [key(1)]


def test_producers_that_know_nothing_of_each_other_keep_one_capacity(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    capacity = 40 * FILE_BYTES
    pipe, theirs = spawn.Pipe()
    given = (str(tmp_path), theirs, range(1000, 1150), (ROWS, WIDTH), capacity)
    other = spawn.Process(target=save_items, args=given)
    other.start()
    assert pipe.poll(200)
    assert pipe.recv() == "ready"
    producer, closing = FolderStore(tmp_path, NAMESPACE, capacity_bytes=capacity, pace=QUICK), threading.Event()
    upkeep = threading.Thread(target=producer.maintain, args=(closing,))
    upkeep.start()
    pipe.send("go")
    for n in range(150):
        producer.write(key(n), SaveSource(random_bits(ROWS, WIDTH, torch.float32), lambda: False))
    assert pipe.poll(200)
    assert pipe.recv() == "saved"
    # All saves are done. Each producer has counted its own at once, and sees the others' with its next walk.
    poll_until(lambda: held_bytes(tmp_path) <= capacity)
    pipe.send("stop")
    producer.close()
    upkeep.join()
    assert pipe.poll(200)
    evictions = producer.take_counters()["evictions"] + pipe.recv()
    other.join(DEADLINE_S)
    assert other.exitcode == 0
    kept = len(held(tmp_path))
    assert kept >= 0.75 * 40, "together they cleared away too much"
    assert evictions == 300 - kept, "each removal is counted once"
