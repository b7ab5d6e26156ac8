"""ECSharedMemoryConnector when all is well: bytes, who meets whom, eviction, options, and that nothing is left."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.ec.shared_memory import ECSharedMemoryConnector
from connectors.ec.shm_attach import attach_arena
from connectors.ec.shm_layout import Geometry
from core.errors import ConfigError
from core.types import ECRole
from tests.connectors.shm_processes import open_store, read, write
from tests.connectors.support import NAMESPACE, ECSides, key, poll_until, random_bits, same_bits

MIB = 1 << 20
ALL_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]

Closing = Callable[[ECSides], ECSides]
Make = Callable[..., ECSides]


def sides(path: Path, /, role: ECRole = ECRole.BOTH, **given: Any) -> ECSides:
    """Both sides over an arena of 4 MiB, unless said otherwise; what ECSides does not know is extra config."""
    ours = {name: given.pop(name) for name in ("dtype", "width", "num_rows", "namespace") if name in given}
    extra = {"path": str(path), "capacity_bytes": 4 * MIB, **given}
    return ECSides(ECSharedMemoryConnector, extra, role, **ours)


@pytest.fixture
def arena(shm_folder: Path) -> Path:
    return shm_folder / "arena"


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (63, 61)])
def test_round_trip_is_bit_for_bit(arena: Path, closing: Closing, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, width = shape
    pair = closing(sides(arena, dtype=dtype, width=width, num_rows=rows + 3))
    embeds = random_bits(rows, width, dtype)
    saved = pair.save(key(1), embeds)
    assert saved.finished_saving == [key(1)]
    assert saved.bytes_saved == embeds.nbytes
    assert pair.look_up(key(1)) is True

    loaded = pair.load(key(1), 2, rows)
    assert loaded.finished_loading == [key(1)]
    assert loaded.bytes_loaded == embeds.nbytes
    assert same_bits(pair.buffer[2 : 2 + rows], embeds)
    assert not pair.buffer[:2].view(torch.uint8).any()
    assert not pair.buffer[2 + rows :].view(torch.uint8).any()
    assert dict(pair.worker.take_counters()) == {"lookup_failures": 0, "breaker_opens": 0, "evictions": 0}


def test_an_item_of_many_chunks_and_of_all_the_arena(arena: Path, closing: Closing) -> None:
    rows = 4096  # 16 MiB, of 16
    pair = closing(sides(arena, capacity_bytes=16 * MIB, width=1024, num_rows=rows))
    embeds = random_bits(rows, 1024, torch.float32)
    assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert pair.load(key(1), 0, rows).finished_loading == [key(1)]
    assert same_bits(pair.buffer, embeds)


def test_a_view_of_the_encoder_buffer_can_be_saved(arena: Path, closing: Closing) -> None:
    pair = closing(sides(arena))
    pair.buffer.copy_(random_bits(32, 6, torch.float32))
    pair.save(key(1), pair.buffer[3:9])
    assert pair.load(key(1), 20, 6).finished_loading == [key(1)]
    assert same_bits(pair.buffer[20:26], pair.buffer[3:9])


def test_stages_that_start_in_any_order_meet(arena: Path, closing: Closing) -> None:
    consumer = closing(sides(arena, ECRole.CONSUMER, negative_ttl_s=0))
    assert consumer.look_up(key(1)) is False
    assert consumer.load(key(1), 0, 5).failed_loading == {key(1): "item is not in the store"}
    assert not arena.exists(), "a consumer made an arena, of a size that is the producer's affair"
    producer = closing(sides(arena, ECRole.PRODUCER))
    embeds = random_bits(5, 6, torch.float32)
    producer.save(key(1), embeds)
    assert consumer.look_up(key(1)) is True
    assert consumer.load(key(1), 0, 5).finished_loading == [key(1)]
    assert same_bits(consumer.buffer[:5], embeds)


def test_without_a_path_those_of_one_namespace_meet(closing: Closing) -> None:
    namespace = f"{os.getpid():016x}" * 4
    given: dict[str, Any] = {"extra": {"capacity_bytes": MIB}, "namespace": namespace}
    producer = closing(ECSides(ECSharedMemoryConnector, role=ECRole.PRODUCER, **given))
    consumer = closing(ECSides(ECSharedMemoryConnector, role=ECRole.CONSUMER, **given))
    producer.save(key(1), random_bits(5, 6, torch.float32))
    assert consumer.look_up(key(1)) is True
    (path,) = Path("/dev/shm").glob(f"triptych-ec-*{namespace[:16]}")
    assert path.stat().st_mode & 0o777 == 0o600


def test_namespaces_in_one_arena_do_not_see_each_other(arena: Path, closing: Closing) -> None:
    ours, theirs = closing(sides(arena)), closing(sides(arena, namespace=NAMESPACE[::-1]))
    a, b = random_bits(5, 6, torch.float32), random_bits(5, 6, torch.float32)
    theirs.save(key(1), a)
    assert ours.look_up(key(1)) is False
    assert ours.load(key(1), 0, 5).failed_loading == {key(1): "item is not in the store"}
    ours.save(key(1), b)
    assert ours.load(key(1), 0, 5).finished_loading == [key(1)]
    assert theirs.load(key(1), 0, 5).finished_loading == [key(1)]
    assert same_bits(ours.buffer[:5], b)
    assert same_bits(theirs.buffer[:5], a)


def test_saving_what_is_there_succeeds_and_takes_no_room(arena: Path, closing: Closing) -> None:
    pair = closing(sides(arena, width=1024, num_rows=768))
    embeds = random_bits(768, 1024, torch.float32)  # 3 of the 4 MiB
    for _ in range(3):
        assert pair.save(key(1), embeds).finished_saving == [key(1)]
    assert pair.load(key(1), 0, 768).finished_loading == [key(1)]
    assert pair.worker.take_counters()["evictions"] == 0


def test_what_was_used_longest_ago_goes_first(arena: Path) -> None:
    store = open_store(arena, 4 * MIB)
    for n in range(4):
        write(store, n, 256)  # a MiB each
    assert read(store, 0, 256) is not None
    write(store, 4, 512)
    assert store.contains([key(n) for n in range(5)]) == [True, False, False, True, True]
    assert store.take_counters() == {"evictions": 2}
    store.close()


def test_what_was_asked_for_is_not_the_next_to_go(arena: Path) -> None:
    """A stage that was told that an item is there will load it in a moment."""
    store = open_store(arena, 4 * MIB)
    for n in range(4):
        write(store, n, 256)
    assert store.contains([key(0)]) == [True]
    write(store, 4, 256)
    assert store.contains([key(n) for n in range(5)]) == [True, False, True, True, True]
    store.close()


def test_room_in_many_pieces_is_room(arena: Path) -> None:
    """An item need not lie in one piece, so nothing is evicted for want of one."""
    store = open_store(arena, 4 * MIB)
    for n in range(16):
        write(store, n, 64)  # 256 KiB each: all is full
    for n in range(0, 16, 2):
        assert read(store, n, 64) is not None  # every second one is used again …
    write(store, 16, 512)  # … and the others are evicted
    assert store.contains([key(n) for n in range(17)]) == [n % 2 == 0 for n in range(17)]
    found = read(store, 16, 512)
    assert found is not None
    store.close()


def test_an_item_of_the_size_of_the_arena_and_one_byte_more_is_refused(arena: Path, closing: Closing) -> None:
    pair = closing(sides(arena, capacity_bytes=MIB, width=1, num_rows=8, dtype=torch.float8_e5m2))
    pair.save(key(1), random_bits(5, 1, torch.float8_e5m2))
    reason = pair.save(key(2), random_bits(MIB + 1, 1, torch.float8_e5m2)).failed_saving[key(2)]
    assert reason == f"the item has {MIB + 1} bytes, the arena capacity_bytes={MIB}"
    assert pair.load(key(1), 0, 5).finished_loading == [key(1)], "another item had to go for it"


def test_items_go_when_their_time_is_over(arena: Path, closing: Closing) -> None:
    pair = closing(sides(arena, ttl_s=0.2, negative_ttl_s=0))
    keeper = closing(sides(arena))
    keeper.save(key(2), random_bits(5, 6, torch.float32))
    pair.save(key(1), random_bits(5, 6, torch.float32))
    poll_until(lambda: not pair.look_up(key(1)))
    assert pair.load(key(1), 0, 5).failed_loading == {key(1): "item is not in the store"}
    evictions = 0

    def swept() -> bool:
        nonlocal evictions
        evictions += pair.worker.take_counters()["evictions"]
        return evictions == 1

    poll_until(swept)
    assert pair.look_up(key(2)) is True

    def there_again() -> bool:  # a busy machine may let its time go by before the load
        assert pair.save(key(1), random_bits(5, 6, torch.float32)).finished_saving == [key(1)]
        return pair.load(key(1), 0, 5).finished_loading == [key(1)]

    poll_until(there_again)


def test_a_save_begins_the_time_anew(arena: Path) -> None:
    store = open_store(arena, MIB, ttl_s=100.0)
    write(store, 1, 1)
    assert store._arena is not None
    index = store._arena.index
    slot = int(index._ready()[0])
    index._expires_s[slot] -= 50
    first = float(index._expires_s[slot])
    write(store, 1, 1)
    assert index._expires_s[slot] > first + 40
    assert math.isfinite(index._expires_s[slot])
    del index
    store.close()


def test_a_clock_that_is_set_makes_nothing_older(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(arena, MIB, ttl_s=100.0)
    write(store, 1, 1)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 3600)
    assert store.contains([key(1)]) == [True]
    store.close()


def test_look_ups_do_no_io_on_the_callers_thread(
    arena: Path, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = closing(sides(arena))
    threads: list[int] = []
    real_fstat = os.fstat

    def recording_fstat(fd: int) -> os.stat_result:
        threads.append(threading.get_ident())
        return real_fstat(fd)

    monkeypatch.setattr(os, "fstat", recording_fstat)
    assert pair.look_up(key(1)) is False
    assert threads
    assert threading.get_ident() not in threads


def test_memory_is_taken_as_items_come(arena: Path) -> None:
    store = open_store(arena, 256 * MIB)
    assert arena.stat().st_blocks * 512 < 2 * MIB
    write(store, 1, 256)
    assert MIB < arena.stat().st_blocks * 512 < 40 * MIB
    store.close()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"path": ""}, "path"),
        ({"path": 3}, "path"),
        ({"path": "relative/arena"}, "path"),
        ({"path": "/dev/shm/"}, "path"),
        ({"path": "/dev/shm/.."}, "path"),
        ({"path": "/nowhere-at-all/arena"}, "path"),
        ({"path": "/dev/shm/nul\0byte"}, "path"),
        ({"path": "/dev/null"}, "path"),
        ({"path": __file__}, "path"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"capacity_bytes": MIB - 1}, "capacity_bytes"),
        ({"capacity_bytes": 1 << 44}, "capacity_bytes"),
        ({"capacity_bytes": "much"}, "capacity_bytes"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": float("inf")}, "ttl_s"),
        ({"paht": "x"}, "paht"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(arena: Path, extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sides(arena, **extra)
    assert caught.value.name == f"--ec-connector-extra-config {named}"
    assert repr(extra[named]) in str(caught.value)
    assert not arena.exists()


def test_a_link_or_a_pipe_is_not_an_arena(arena: Path) -> None:
    os.mkfifo(arena)
    with pytest.raises(ConfigError, match="not a regular file"):
        sides(arena)
    arena.unlink()
    arena.symlink_to(arena.parent / "elsewhere")
    with pytest.raises(ConfigError, match="path"):
        sides(arena)
    assert list(arena.parent.iterdir()) == [arena]


def test_two_capacities_in_use_are_refused_with_both(arena: Path, closing: Closing) -> None:
    first = closing(sides(arena, capacity_bytes=2 * MIB))
    with pytest.raises(ConfigError, match=rf"capacity_bytes={4 * MIB}.*holds {2 * MIB} bytes"):
        sides(arena, capacity_bytes=4 * MIB)
    closing(sides(arena, ECRole.CONSUMER, capacity_bytes=4 * MIB))  # has no say
    assert first.save(key(1), random_bits(5, 6, torch.float32)).finished_saving == [key(1)]


def test_every_geometry_is_one_that_its_own_header_is_read_as(shm_folder: Path) -> None:
    for capacity_bytes in (MIB, 3 * MIB + 17, (1 << 32) + 5, (1 << 33) + (1 << 15), 5 << 40):
        geometry = Geometry.for_capacity(capacity_bytes)
        assert capacity_bytes - geometry.block_bytes < geometry.capacity_bytes <= capacity_bytes
    path = shm_folder / "odd"
    for _ in range(2):
        arena = attach_arena(path, 3 * MIB + 17, True, lambda _: None)
        assert arena is not None
        assert arena.geometry == Geometry.for_capacity(3 * MIB + 17)
    assert path.exists()
    path.unlink()
