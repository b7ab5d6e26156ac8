"""PeerLookups: what a consumer remembers of what peers said, and for whom."""

from __future__ import annotations

import time

from connectors.ec.lookup import DOUBT_S
from connectors.ec.peer_lookups import PeerLookups
from connectors.ec.peer_orders import Question
from connectors.ec.peer_wire import Source

SOURCE = Source("tcp://127.0.0.1:1", "a" * 32, "b" * 32)


class Peers:
    """Lookups that believe for ever, and the questions that they put."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.lookups = PeerLookups(
            self.questions.append, positive_ttl_s=float("inf"), negative_ttl_s=float("inf"), timeout_s=2
        )
        self.lookups.add_source("k", SOURCE)

    def answer(self, found: bool) -> None:
        self.questions[-1].found = found
        self.lookups.ended(self.questions[-1])


def test_an_item_that_its_encoder_made_again_is_asked_for_again() -> None:
    """It comes from the same place under the same token, so the source alone says nothing new."""
    peers = Peers()
    assert peers.lookups.ask("k") is None
    peers.answer(False)
    assert peers.lookups.ask("k") is False
    peers.lookups.add_source("k", SOURCE)
    peers.lookups.doubt("k")
    assert peers.lookups.ask("k") is None, "a no outlived what it was true of"
    peers.answer(True)
    peers.lookups.doubt("k")
    assert peers.lookups.ask("k") is True, "what is there need not be asked for again"
    assert len(peers.questions) == 2


def test_a_no_on_its_way_is_not_for_who_comes_now() -> None:
    peers = Peers()
    assert peers.lookups.ask("k") is None
    early = peers.questions[0]
    peers.lookups.doubt("k")
    assert peers.lookups.ask("k") is None
    peers.lookups.ended(early)
    assert peers.lookups.ask("k") is None
    peers.answer(True)
    assert peers.lookups.ask("k") is True


def test_those_who_come_do_not_keep_the_others_waiting_for_ever() -> None:
    peers = Peers()
    end_s = time.monotonic() + DOUBT_S + 5
    while True:
        peers.lookups.doubt("k")
        if peers.lookups.ask("k") is False:
            break
        assert time.monotonic() < end_s
        peers.answer(False)
    peers.lookups.doubt("k")
    assert peers.lookups.ask("k") is None, "the next one may have his own answer again"
