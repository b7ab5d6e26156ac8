"""A body on its way into the blocks: however the bytes come, they go where they belong, and damage is seen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import xxhash

from connectors.kv import rows
from connectors.kv.arrival import Arrival, Waste
from connectors.kv.rows import BlockRows, checksum_of, grains_of
from tests.connectors.support import random_bits, same_bits

#: Lengths of the places of each grain.
GRAINS = [[3, 2], [4], [1, 2]]
SIZE = sum(itertools.chain(*GRAINS))
DATA = bytes(range(1, SIZE + 1))


def grains_in(memory: bytearray) -> Iterator[list[memoryview]]:
    """Places of which the later ones come first in memory."""
    end = len(memory)
    for lengths in GRAINS:
        places = []
        for length in lengths:
            places.append(memoryview(memory)[end - length : end])
            end -= length
        yield places


def expected_memory() -> bytearray:
    memory, begin = bytearray(SIZE), 0
    for place in itertools.chain(*grains_in(memory)):
        place[:] = DATA[begin : begin + len(place)]
        begin += len(place)
    return memory


def checksums() -> list[bytes]:
    cuts = itertools.accumulate(map(sum, GRAINS), initial=0)
    return [xxhash.xxh3_128_digest(DATA[begin:end]) for begin, end in itertools.pairwise(cuts)]


def bring(body: Arrival | Waste, data: bytes) -> None:
    """As a stream does: as much at a time as there are places for."""
    while data:
        count = 0
        for place in body.places():
            part = data[count : count + len(place)]
            place[: len(part)] = part
            count += len(part)
        assert count, "there is no place for what comes"
        data = data[count:]
        body.received(count)


def test_every_split_of_the_bytes_gives_the_same() -> None:
    expected = expected_memory()
    for is_cut in itertools.product([False, True], repeat=SIZE - 1):
        memory, landed = bytearray(SIZE), list[bytes]()
        arrival = Arrival(SIZE, grains_in(memory), checksums(), lambda to=landed, at=memory: to.append(bytes(at)))
        begin = 0
        for end in [n for n, cut in enumerate(is_cut, 1) if cut] + [SIZE]:
            assert arrival.num_missing == SIZE - begin
            bring(arrival, DATA[begin:end])
            begin = end
        assert arrival.num_missing == 0
        assert landed == []
        assert arrival.end()
        assert memory == expected
        assert landed == [expected]


@pytest.mark.parametrize("wrong", range(SIZE))
def test_damage_in_any_grain_is_seen_and_does_not_land(wrong: int) -> None:
    memory = bytearray(SIZE)
    arrival = Arrival(SIZE, grains_in(memory), checksums(), lambda: pytest.fail("it landed"))
    bring(arrival, DATA[:wrong] + bytes([DATA[wrong] ^ 1]) + DATA[wrong + 1 :])
    assert not arrival.end()


@pytest.mark.parametrize(
    "change",
    [
        lambda right: right[:-1],
        lambda right: [*right, right[-1]],
        lambda right: right[::-1],
        lambda right: [*right[:-1], right[-1][:-1]],
        lambda _: [],
    ],
    ids=["too few", "too many", "in another order", "cut short", "none"],
)
def test_wrong_checksums_are_never_taken_for_right_ones(change: Callable[[list[bytes]], Sequence[bytes]]) -> None:
    arrival = Arrival(SIZE, grains_in(bytearray(SIZE)), change(checksums()), lambda: pytest.fail("it landed"))
    bring(arrival, DATA)
    assert not arrival.end()


@pytest.mark.parametrize("damaged", [None, 0, 2, 4])
def test_blocks_of_a_cache_arrive_grain_by_grain(damaged: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows a grain, the last one shorter, neighbours or not; `damaged`: a row of the first, middle, last grain."""
    blocks = random_bits(8, 5, torch.float32)
    monkeypatch.setattr(rows, "_GRAIN_BYTES", 2 * blocks[0].nbytes)
    theirs, ours = [1, 2, 3, 0, 7], [4, 5, 1, 0, 6]
    source, target = BlockRows(blocks), torch.zeros_like(blocks)
    sent = source.read(theirs)
    sums = b"".join(map(checksum_of, grains_of(sent, source.grain)))
    data = bytearray(b"".join(array.tobytes() for array in sent))
    arrival = BlockRows(target).arrival(ours, sums)
    assert arrival.num_missing == len(data)
    if damaged is not None:
        data[damaged * source.row_bytes] ^= 1
    for part in (data[begin : begin + 7] for begin in range(0, len(data), 7)):
        bring(arrival, bytes(part))
    assert arrival.end() == (damaged is None)
    assert same_bits(target[ours], blocks[theirs]) == (damaged is None)
    assert not target[[2, 3, 7]].any()


@pytest.mark.parametrize("num_bytes", [1, (256 << 10) - 1, (256 << 10) + 1, 1_000_000])
def test_waste_takes_what_it_was_told_and_not_a_byte_more(num_bytes: int) -> None:
    """What follows is the next message's."""
    waste, dice = Waste(num_bytes), random.Random(0)
    while waste.num_missing:
        room = sum(map(len, waste.places()))
        assert 0 < room <= waste.num_missing
        bring(waste, bytes(dice.randint(1, room)))
    assert waste.end()
