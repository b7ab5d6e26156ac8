"""Whatever somebody does to the arena's file, a load ends as the right tensor or as a reason, and work goes on."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from connectors.ec.shared_memory import ECSharedMemoryConnector
from connectors.ec.shm_arena import Arena
from connectors.ec.shm_index import READY
from connectors.ec.shm_layout import (
    ENTRY_BYTES,
    STATIC_BYTES,
    VERSION,
    Geometry,
    pack_entry,
    pack_header,
)
from connectors.ec.shm_locks import ATTACHED, FileLocks
from connectors.ec.store import SaveSource
from core.errors import ConfigError
from core.types import ECRole
from tests.connectors.shm_processes import embeds_of, open_store, read, write
from tests.connectors.support import DEADLINE_S, ECSides, key, poll_until, random_bits, same_bits

MIB = 1 << 20
EMBEDS = random_bits(5, 6, torch.float32)
Closing = Callable[[ECSides], ECSides]
Spoil = Callable[[Arena, int], None]


@pytest.fixture
def arena(shm_folder: Path) -> Path:
    return shm_folder / "arena"


def sides(path: Path, role: ECRole = ECRole.BOTH) -> ECSides:
    extra = {"path": str(path), "capacity_bytes": MIB, "negative_ttl_s": 0}
    return ECSides(ECSharedMemoryConnector, extra, role)


def arena_of(pair: ECSides) -> Arena:
    arena = pair.worker._store._arena  # type: ignore[attr-defined]
    assert isinstance(arena, Arena)
    return arena


def poke(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, offset)
    os.close(fd)


def flip(where: Callable[[Geometry, int], int]) -> Spoil:
    """Flip a bit of the file, `where` the geometry and the item's slot say."""

    def spoil(arena: Arena, slot: int) -> None:
        offset = where(arena.geometry, slot)
        poke(arena.path, offset, bytes([arena._map[offset] ^ 1]))

    return spoil


def entry_at(offset: int) -> Spoil:
    return flip(lambda geometry, slot: geometry.entries_offset + slot * ENTRY_BYTES + offset)


def give_a_block_away(arena: Arena, slot: int) -> None:
    poke(arena.path, arena.geometry.owners_offset, bytes(4))


def give_it_a_block_more(arena: Arena, slot: int) -> None:
    entry = arena.index.entry(slot)
    assert entry is not None
    raw = pack_entry(msgspec.structs.replace(entry, num_blocks=2), arena.index._arena_id, slot)
    poke(arena.path, arena.geometry.entries_offset + slot * ENTRY_BYTES, raw)


def let_it_be_larger_than_its_blocks(arena: Arena, slot: int) -> None:
    entry = arena.index.entry(slot)
    assert entry is not None
    raw = pack_entry(msgspec.structs.replace(entry, num_bytes=1 << 40), arena.index._arena_id, slot)
    poke(arena.path, arena.geometry.entries_offset + slot * ENTRY_BYTES, raw)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (flip(lambda geometry, slot: geometry.data_offset), "checksum"),
        (flip(lambda geometry, slot: geometry.data_offset + EMBEDS.nbytes - 1), "checksum"),
        (flip(lambda geometry, slot: geometry.tags_offset + 8 * slot), "not in the store"),
        (flip(lambda geometry, slot: geometry.states_offset + slot), "not in the store"),
        (entry_at(0), "not in the store"),  # namespace
        (entry_at(32), "not in the store"),  # key
        (entry_at(64), "entry of the item is damaged"),  # checksum
        (entry_at(80), "entry of the item is damaged"),  # size
        (entry_at(88), "entry of the item is damaged"),  # rows
        (entry_at(112), "entry of the item is damaged"),  # the checksum's checksum
        (give_a_block_away, "do not agree"),
        (give_it_a_block_more, "do not agree"),
        (let_it_be_larger_than_its_blocks, "contradicts itself"),
    ],
)
def test_a_spoilt_item_fails_as_data_and_can_be_made_again(
    arena: Path, closing: Closing, spoil: Spoil, reason: str
) -> None:
    pair = closing(sides(arena))
    pair.save(key(1), EMBEDS)
    slot = int(arena_of(pair).index._ready()[0])
    pair.save(key(2), EMBEDS)
    spoil(arena_of(pair), slot)

    output = pair.load(key(1), 8, 5)
    assert output.finished_loading == []
    assert reason in output.failed_loading[key(1)]
    assert not pair.buffer[:8].any()
    assert not pair.buffer[13:].any()
    assert pair.look_up(key(1)) is False

    assert pair.save(key(1), EMBEDS).finished_saving == [key(1)]
    for n in (1, 2):
        assert pair.load(key(n), 20, 5).finished_loading == [key(n)]
        assert same_bits(pair.buffer[20:25], EMBEDS)


def test_a_save_replaces_a_damaged_item_that_nobody_has_read(arena: Path, closing: Closing) -> None:
    pair = closing(sides(arena))
    pair.save(key(1), EMBEDS)
    flip(lambda geometry, slot: geometry.data_offset)(arena_of(pair), 0)
    assert pair.save(key(1), EMBEDS).finished_saving == [key(1)]
    assert pair.load(key(1), 0, 5).finished_loading == [key(1)]
    assert same_bits(pair.buffer[:5], EMBEDS)


def test_items_whose_payloads_were_swapped_are_not_used(arena: Path, closing: Closing) -> None:
    pair = closing(sides(arena))
    pair.save(key(1), EMBEDS)
    pair.save(key(2), random_bits(5, 6, torch.float32))
    geometry = arena_of(pair).geometry
    first, second = geometry.data_offset, geometry.data_offset + geometry.block_bytes
    raw = arena.read_bytes()
    poke(arena, first, raw[second : second + EMBEDS.nbytes])
    poke(arena, second, raw[first : first + EMBEDS.nbytes])
    for n in (1, 2):
        assert "checksum" in pair.load(key(n), 0, 5).failed_loading[key(n)]


def test_an_entry_copied_to_another_slot_is_not_used(arena: Path, closing: Closing) -> None:
    pair = closing(sides(arena))
    pair.save(key(1), EMBEDS)
    inside = arena_of(pair)
    geometry, slot = inside.geometry, int(inside.index._ready()[0])
    begin = geometry.entries_offset + slot * ENTRY_BYTES
    other = slot + 1
    poke(arena, geometry.entries_offset + other * ENTRY_BYTES, inside._map[begin : begin + ENTRY_BYTES])
    poke(arena, geometry.tags_offset + 8 * other, inside._map[geometry.tags_offset + 8 * slot :][:8])
    poke(arena, geometry.states_offset + slot, bytes([0]))
    poke(arena, geometry.states_offset + other, bytes([READY]))
    assert pair.load(key(1), 0, 5).failed_loading


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "what"),
    [(4, 6, "float32", "shape"), (6, 5, "float32", "shape"), (5, 12, "bfloat16", "dtype")],
)
def test_an_order_of_another_form_fails_and_keeps_the_item(
    arena: Path, closing: Closing, rows: int, width: int, dtype: str, what: str
) -> None:
    pair = closing(sides(arena))
    pair.save(key(1), EMBEDS)
    extra = {"path": str(arena), "capacity_bytes": MIB}
    other = closing(ECSides(ECSharedMemoryConnector, extra, width=width, dtype=getattr(torch, dtype)))
    assert f"{what} of the item is" in other.load(key(1), 0, rows).failed_loading[key(1)]
    assert pair.load(key(1), 0, 5).finished_loading == [key(1)]


@pytest.mark.parametrize("bad", ["../../../escape", "", "A" * 64, "0" * 63, "0" * 10_000])
def test_what_is_not_a_key_is_refused(arena: Path, closing: Closing, bad: str) -> None:
    pair = closing(sides(arena))
    assert pair.look_up(bad) is False
    assert pair.load(bad, 0, 5).failed_loading == {bad: "not an item's key"}
    assert pair.save(bad, EMBEDS).failed_saving == {bad: "not an item's key"}


# ---- the file as a whole ----


def remove(path: Path) -> None:
    path.unlink()


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_to(num_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, num_bytes)


def scribble(path: Path) -> None:
    poke(path, 40, b"\xff" * 8)


def claim_to_be_newer(path: Path) -> None:
    poke(path, 8, bytes([VERSION + 1]))


@pytest.mark.parametrize(
    "harm",
    [remove, move_away, replace, cut, cut_to(0), cut_to(100), cut_to(5000), scribble, claim_to_be_newer],
    ids=["removed", "moved", "replaced", "cut", "emptied", "stub", "no tables", "header", "newer"],
)
def test_an_arena_that_is_lost_while_in_use_is_made_anew(
    arena: Path, closing: Closing, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Every engine that had it open finds that out by itself, and all meet in the new one."""
    caplog.set_level(logging.WARNING)
    producer, consumer = closing(sides(arena, ECRole.PRODUCER)), closing(sides(arena, ECRole.CONSUMER))
    producer.save(key(1), EMBEDS)
    assert consumer.look_up(key(1)) is True
    harm(arena)
    for pair in (producer, consumer):
        for side in (pair.scheduler, pair.worker):  # as if half a second had gone by
            side._store._arena._follow_path_at_s = 0.0  # type: ignore[attr-defined]

    if harm is not replace:  # a copy is an arena as good as the other
        assert list(consumer.load(key(1), 0, 5).failed_loading) == [key(1)]
        poll_until(lambda: not producer.look_up(key(1)))
    assert producer.save(key(1), EMBEDS).finished_saving == [key(1)]
    poll_until(lambda: bool(consumer.look_up(key(1))))
    assert consumer.load(key(1), 0, 5).finished_loading == [key(1)]
    assert same_bits(consumer.buffer[:5], EMBEDS)
    assert "removed, replaced or damaged" in caplog.text
    counted = [pair.worker.take_counters()["breaker_opens"] for pair in (producer, consumer)]
    assert counted == [0, 0]


def test_an_arena_lost_in_the_middle_of_a_save_is_made_anew_for_it(arena: Path) -> None:
    store = open_store(arena, MIB)
    first = True

    class Losing(SaveSource):
        @property
        def data(self) -> memoryview:
            nonlocal first
            if first:
                arena.unlink()
            first = False
            return super().data

    store.write(key(1), Losing(embeds_of(1, 9), lambda: False))
    found = read(store, 1, 9)
    assert found is not None
    assert torch.equal(found, embeds_of(1, 9))
    store.close()
    assert not arena.exists()


def test_a_folder_that_vanished_does_not_come_back(shm_folder: Path, closing: Closing) -> None:
    folder = shm_folder / "gone"
    folder.mkdir()
    pair = closing(sides(folder / "arena"))
    pair.save(key(1), EMBEDS)
    shutil.rmtree(folder)
    assert list(pair.load(key(1), 0, 5).failed_loading) == [key(1)]
    assert "storage" in pair.save(key(1), EMBEDS).failed_saving[key(1)]
    assert not folder.exists()
    folder.mkdir()
    poll_until(lambda: pair.save(key(1), EMBEDS).finished_saving == [key(1)])
    assert pair.load(key(1), 0, 5).finished_loading == [key(1)]


@pytest.mark.parametrize("cut_at", [0, 5, STATIC_BYTES - 1, 5000])
def test_a_damaged_arena_that_a_killed_process_left_is_made_anew(arena: Path, closing: Closing, cut_at: int) -> None:
    geometry = Geometry.for_capacity(MIB)
    arena.write_bytes((pack_header(geometry, bytes(16)) + bytes(geometry.file_bytes - STATIC_BYTES))[:cut_at])
    pair = closing(sides(arena))
    assert pair.save(key(1), EMBEDS).finished_saving == [key(1)]
    assert arena.stat().st_size == geometry.file_bytes


def test_an_arena_that_a_killed_process_left_is_used_again(arena: Path) -> None:
    store = open_store(arena, MIB)
    write(store, 1, 5)
    raw = arena.read_bytes()
    store.close()
    arena.write_bytes(raw)
    again = open_store(arena, MIB)
    found = read(again, 1, 5)
    assert found is not None
    assert torch.equal(found, embeds_of(1, 5))
    again.close()
    assert not arena.exists()


def test_an_arena_of_another_version_is_refused_while_used_and_else_replaced(arena: Path) -> None:
    raw = pack_header(Geometry.for_capacity(MIB), bytes(16))
    arena.write_bytes(raw[:8] + b"\x07" + raw[9:])
    fd = os.open(arena, os.O_RDWR)  # a process of the other version, as far as anybody can see
    FileLocks(fd).lock(ATTACHED, shared=True)
    for side in (sides, lambda path: sides(path, ECRole.CONSUMER)):
        with pytest.raises(ConfigError, match=rf"path=.*format version is 7, this program's is {VERSION}"):
            side(arena)
    os.close(fd)
    pair = sides(arena)
    assert pair.save(key(1), EMBEDS).finished_saving == [key(1)]
    pair.close()


def test_another_users_file_is_refused(arena: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena.write_bytes(pack_header(Geometry.for_capacity(MIB), bytes(16)))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match=r"path=.*belongs to user"):
        sides(arena)
    assert arena.exists()


def test_a_thread_may_find_the_arena_gone_while_another_one_lets_go_of_it(
    arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is between the look at the file and its first use when the other one attaches anew."""
    store = open_store(arena, MIB)
    store.contains([key(1)])
    is_current = Arena.is_current
    looking, go_on = threading.Event(), threading.Event()
    answers: list[list[bool]] = []

    def look(self: Arena) -> bool:
        if threading.current_thread() is late and not go_on.is_set():
            looking.set()
            assert go_on.wait(DEADLINE_S)
        return is_current(self)

    late = threading.Thread(target=lambda: answers.append(store.contains([key(1)])))
    monkeypatch.setattr(Arena, "is_current", look)
    late.start()
    assert looking.wait(DEADLINE_S)
    arena.unlink()
    assert store.contains([key(1)]) == [False]  # lets go of the one that is lost
    go_on.set()
    late.join(DEADLINE_S)
    assert answers == [[False]]
    write(store, 1, 5)
    assert store.contains([key(1)]) == [True]
    store.close()
