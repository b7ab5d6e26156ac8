"""The board on which a producer publishes what it has leased: what a consumer finds there, and what it does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from connectors.kv import board, rows
from connectors.kv.base import SAME_HOST
from connectors.kv.board import BOARD_BYTES, ChecksumBoard, MappedBoard
from connectors.kv.server import BlockServer
from connectors.kv.wire import Pull, new_token
from core.types import KVRole
from tests.connectors.support import KVPair, poll_until, same_bits

Closing = Callable[[KVPair], KVPair]
Boards = tuple[ChecksumBoard, MappedBoard]
THEIRS, OURS = [5, 1, 2, 3, 9, 8, 0], [0, 3, 4, 5, 1, 2, 15]
GRAIN = 2


@pytest.fixture
def boards() -> Boards:
    memory = bytearray(BOARD_BYTES)
    return ChecksumBoard(memory), MappedBoard(memory)


def publish(ours: ChecksumBoard, block_ids: list[int], num_grains: int | None = None) -> str:
    """Returns the token; grain n has a checksum of sixteen times n."""
    token = new_token()
    ours.open("r", token, block_ids)
    ends = [min(begin + GRAIN, len(block_ids)) for begin in range(0, len(block_ids), GRAIN)]
    for n, end in enumerate(ends[:num_grains]):
        ours.add(token, n, bytes([n % 256]) * 16, end)
    return token


def test_what_was_published_is_found_until_it_is_withdrawn(boards: Boards) -> None:
    ours, theirs = boards
    others = [publish(ours, [n]) for n in range(3)]
    token = publish(ours, THEIRS)
    assert theirs.find("r", token, 0, 7, GRAIN) == (THEIRS, b"".join(bytes([n]) * 16 for n in range(4)))
    assert theirs.find("r", token, 2, 4, GRAIN) == (THEIRS[2:6], bytes([1]) * 16 + bytes([2]) * 16)
    ours.withdraw(token)
    ours.withdraw(token)
    assert theirs.find("r", token, 0, 7, GRAIN) is None
    assert all(theirs.find("r", other, 0, 1, GRAIN) for other in others)
    ours.add(token, 0, bytes(16), 2)  # the lease ended while it was being summed up
    assert theirs.find("r", token, 0, 2, GRAIN) is None


def test_only_whole_grains_that_are_summed_up_are_found(boards: Boards) -> None:
    ours, theirs = boards
    token = publish(ours, THEIRS, num_grains=2)
    assert theirs.find("r", token, 0, 4, GRAIN) is not None
    for first, count in ((0, 6), (0, 3), (1, 3), (4, 2), (6, 1), (4094, 4)):
        assert theirs.find("r", token, first, count, GRAIN) is None
    assert theirs.find("r", new_token(), 0, 2, GRAIN) is None
    assert theirs.find("another", token, 0, 2, GRAIN) is None


def test_a_board_tells_nobody_a_token() -> None:
    memory = bytearray(BOARD_BYTES)
    token = publish(ChecksumBoard(memory), THEIRS)
    assert bytes.fromhex(token) not in memory
    assert token.encode() not in memory


def test_the_last_leases_have_the_room(boards: Boards) -> None:
    ours, theirs = boards
    tokens = [publish(ours, [n]) for n in range(board._MAX_RECORDS + 2)]
    assert [theirs.find("r", token, 0, 1, GRAIN) is None for token in tokens] == [True, True] + [
        False
    ] * board._MAX_RECORDS
    too_long = publish(ours, list(range(board._MAX_BLOCKS + 1)))
    assert theirs.find("r", too_long, 0, 2, GRAIN) is None
    assert theirs.find("r", tokens[-1], 0, 1, GRAIN) is not None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks of each piece that a producer was asked for."""
    pieces: list[int] = []
    send = BlockServer._send_rows

    def count(self: BlockServer, identity: bytes, pull: Pull, leased: list[int]) -> None:
        pieces.append(pull.count)
        send(self, identity, pull, leased)

    monkeypatch.setattr(BlockServer, "_send_rows", count)
    return pieces


def pair(closing: Closing, monkeypatch: pytest.MonkeyPatch, **extra: Any) -> tuple[KVPair, KVPair]:
    """A producer and a consumer whose grain is two blocks."""
    prefill = closing(KVPair(KVRole.PRODUCER))
    monkeypatch.setattr(rows, "_GRAIN_BYTES", GRAIN * prefill.blocks[0].nbytes)
    return closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER, **extra))


def is_idle(prefill: KVPair) -> bool:
    assert prefill.worker._server is not None
    return not prefill.worker._server.is_behind


def test_a_published_lease_is_pulled_without_a_question(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    prefill, decode = pair(closing, monkeypatch, blocks_per_message=5)
    handle = prefill.lease("r", THEIRS)
    poll_until(lambda: is_idle(prefill))
    decode.pull("d", handle, OURS)
    output = decode.report()
    assert (output.finished_recving, output.roads, output.num_retries) == (["d"], {"d": SAME_HOST}, 0)
    assert same_bits(decode.blocks[OURS], prefill.blocks[THEIRS])
    assert prefill.report().finished_sending == ["r"]
    assert not asked


def test_a_lease_without_a_record_is_asked_for(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    monkeypatch.setattr(board, "_MAX_BLOCKS", len(THEIRS) - 1)
    prefill, decode = pair(closing, monkeypatch)
    handle = prefill.lease("r", THEIRS)
    poll_until(lambda: is_idle(prefill))
    decode.pull("d", handle, OURS)
    output = decode.report()
    assert (output.roads, output.num_retries, len(asked)) == ({"d": SAME_HOST}, 0, 1)
    assert same_bits(decode.blocks[OURS], prefill.blocks[THEIRS])


def test_what_changed_since_it_was_published_is_asked_for(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    prefill, decode = pair(closing, monkeypatch)
    handle = prefill.lease("r", THEIRS)
    poll_until(lambda: is_idle(prefill))
    prefill.blocks[THEIRS[3]] = 7
    decode.pull("d", handle, OURS)
    output = decode.report()
    assert (output.roads, output.num_retries, len(asked)) == ({"d": SAME_HOST}, 1, 1)
    assert same_bits(decode.blocks[OURS], prefill.blocks[THEIRS])


def test_a_part_of_a_lease_that_ends_within_a_grain_is_asked_for(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    prefill, decode = pair(closing, monkeypatch)
    handle = prefill.lease("r", THEIRS)
    poll_until(lambda: is_idle(prefill))
    decode.pull("d", handle, OURS[:3])
    output = decode.report()
    assert (output.finished_recving, output.num_retries, len(asked)) == (["d"], 0, 1)
    assert same_bits(decode.blocks[OURS[:3]], prefill.blocks[THEIRS[:3]])


def test_a_lease_that_was_given_up_is_on_no_board(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    prefill, decode = pair(closing, monkeypatch)
    handle = prefill.lease("r", THEIRS)
    poll_until(lambda: is_idle(prefill))
    prefill.scheduler.release("r")
    prefill.step()
    decode.pull("d", handle, OURS)
    output = decode.report()
    assert (output.finished_recving, output.given_up_recving) == ([], ["d"])
    assert not decode.blocks.any()
