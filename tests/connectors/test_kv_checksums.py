"""Checksums that a producer takes before it is asked: known to be used, and never trusted twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connectors.kv import checksums, rows
from connectors.kv.base import SAME_HOST
from connectors.kv.transfer import NETWORK
from core.types import KVRole
from tests.connectors.support import KVPair, poll_until, same_bits

Closing = Callable[[KVPair], KVPair]
THEIRS, OURS = [5, 1, 2, 3, 9, 8, 0], [0, 3, 4, 5, 1, 2, 15]

pytestmark = pytest.mark.parametrize("road", [NETWORK, SAME_HOST])


@pytest.fixture
def pairs(closing: Closing, road: str, monkeypatch: pytest.MonkeyPatch) -> tuple[KVPair, KVPair]:
    """A producer and a consumer whose grain is two blocks; two grains are summed up in one go."""
    same_host = "always" if road == SAME_HOST else "never"
    prefill = closing(KVPair(KVRole.PRODUCER))
    monkeypatch.setattr(rows, "_GRAIN_BYTES", 2 * prefill.blocks[0].nbytes)
    monkeypatch.setattr(checksums, "_PORTION_BYTES", 4 * prefill.blocks[0].nbytes)
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER, same_host=same_host))
    return prefill, decode


def is_idle(prefill: KVPair) -> bool:
    assert prefill.worker._server is not None
    return not prefill.worker._server.is_behind


def test_nothing_is_summed_up_when_the_consumer_asks(
    pairs: tuple[KVPair, KVPair], road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pairs
    handle = prefill.lease("r", THEIRS)
    poll_until(lambda: is_idle(prefill))
    monkeypatch.setattr(checksums, "checksum_of", None)
    decode.pull("d", handle, OURS)
    output = decode.report()
    assert (output.roads, output.num_retries) == ({"d": road}, 0)
    assert same_bits(decode.blocks[OURS], prefill.blocks[THEIRS])


def test_what_is_asked_for_again_is_summed_up_again(pairs: tuple[KVPair, KVPair], road: str) -> None:
    """Else a block that changed after its checksum had been taken could never be pulled."""
    prefill, decode = pairs
    handle = prefill.lease("r", THEIRS)
    poll_until(lambda: is_idle(prefill))
    prefill.blocks[THEIRS[3]] = 7
    decode.pull("d", handle, OURS)
    output = decode.report()
    assert (output.roads, output.num_retries) == ({"d": road}, 1)
    assert same_bits(decode.blocks[OURS], prefill.blocks[THEIRS])


def test_a_part_that_no_checksum_was_taken_of_is_summed_up_when_it_is_asked_for(
    pairs: tuple[KVPair, KVPair], closing: Closing, road: str
) -> None:
    """A consumer may cut a pull elsewhere."""
    prefill, _ = pairs
    same_host = "always" if road == SAME_HOST else "never"
    decode = closing(KVPair(KVRole.CONSUMER, same_host=same_host, blocks_per_message=3))
    handle = prefill.lease("r", THEIRS)
    poll_until(lambda: is_idle(prefill))
    decode.pull("d", handle, OURS)
    output = decode.report()
    assert (output.roads, output.num_retries) == ({"d": road}, 0)
    assert same_bits(decode.blocks[OURS], prefill.blocks[THEIRS])
