"""`num_leased`: what a drain waits for is what a consumer may still come for, and nothing else that is held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from connectors.ec import peer_memory
from connectors.ec.base import ECConnectorOutput
from connectors.ec.shared_storage import ECSharedStorageConnector
from connectors.ec.tiered import ECTieredConnector
from core.types import ECRole
from tests.connectors.support import DEADLINE_S, ECSides, key, poll_until, random_bits
from tests.connectors.test_ec_peer import Closing, consumer, encoder, hand_over


@pytest.fixture
def theirs(closing: Closing) -> ECSides:
    """An encoder that has just saved item 1."""
    return saved(closing(encoder()))


def saved(sides: ECSides) -> ECSides:
    sides.save(key(1), random_bits(7, 6, torch.float32))
    return sides


def step(sides: ECSides) -> None:
    """The scheduler side's orders reach the worker side."""
    sides.worker.bind_connector_metadata(sides.scheduler.build_connector_meta())
    sides.worker.start_load_caches()
    sides.worker.clear_connector_metadata()


def pull(theirs: ECSides, ours: ECSides) -> None:
    theirs.bell._rung.clear()
    assert ours.load(key(1), 0, 7).finished_loading == [key(1)]
    assert theirs.bell._rung.wait(DEADLINE_S), "an engine that has nothing else to do sleeps on"
    assert theirs.worker.num_leased() == 0


def test_a_new_item_is_waited_for_until_it_was_pulled(closing: Closing, theirs: ECSides) -> None:
    ours = closing(consumer())
    assert theirs.worker.num_leased() == 1
    hand_over(theirs, ours)
    step(theirs)
    assert theirs.worker.num_leased() == 1
    pull(theirs, ours)
    assert theirs.scheduler.has_cache_item(key(1)) is True, "it is held, and no reason to stay"


def test_a_consumer_that_was_so_quick_is_not_waited_for_again(closing: Closing, theirs: ECSides) -> None:
    """It was told of the item in the step before, pulled it, and only then the worker side hears of it."""
    ours = closing(consumer())
    hand_over(theirs, ours)
    pull(theirs, ours)
    step(theirs)
    assert theirs.worker.num_leased() == 0


def test_an_item_that_is_told_of_again_is_waited_for_a_moment(
    closing: Closing, theirs: ECSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has it already says nothing, so this ends by itself; whoever lacks it asks, and is waited for."""
    first, second = closing(consumer()), closing(consumer())
    hand_over(theirs, first)
    step(theirs)
    pull(theirs, first)
    monkeypatch.setattr(peer_memory, "_TOLD_S", 1.0)
    hand_over(theirs, second)
    step(theirs)
    assert theirs.worker.num_leased() == 1
    poll_until(lambda: theirs.worker.num_leased() == 0)
    assert second.look_up(key(1)) is True
    assert theirs.worker.num_leased() == 1
    pull(theirs, second)


def test_who_asks_again_and_never_comes_is_not_waited_for(closing: Closing, theirs: ECSides) -> None:
    """As an engine does that has the item from elsewhere; else a popular item would keep a leaving encoder for ever."""
    memory = theirs.worker._memory  # type: ignore[attr-defined]
    memory.pulled(key(1))
    assert theirs.worker.num_leased() == 0
    memory.asked([key(1)])
    first = memory._awaited[key(1)]
    memory.asked([key(1)])
    assert memory._awaited[key(1)] == first
    memory.pulled(key(1))
    memory.asked([key(1)])
    assert theirs.worker.num_leased() == 1, "who pulled it may lack it again"


def test_being_told_of_again_keeps_no_item_from_making_room(closing: Closing) -> None:
    theirs, ours = closing(encoder(capacity_bytes=4096)), closing(consumer(num_rows=70))
    embeds = random_bits(70, 6, torch.float32)  # one fits, two do not
    theirs.save(key(1), embeds)
    hand_over(theirs, ours)
    step(theirs)
    assert ours.load(key(1), 0, 70).finished_loading == [key(1)]
    theirs.wait_until(lambda: theirs.worker.num_leased() == 0)
    hand_over(theirs, ours)
    step(theirs)
    assert theirs.save(key(2), embeds).finished_saving == [key(2)]
    assert theirs.worker.num_leased() == 1, "what is not held any more is nothing to wait for"


def test_what_the_engine_uses_itself_is_not_waited_for(closing: Closing) -> None:
    both = saved(closing(encoder(ECRole.BOTH)))
    assert both.worker.num_leased() == 1
    hand_over(both, both)
    step(both)
    assert both.worker.num_leased() == 0
    assert both.load(key(1), 0, 7).finished_loading == [key(1)]
    assert both.worker.num_leased() == 0


def test_tiers_are_waited_for_together(closing: Closing, tmp_path: Path) -> None:
    folder = {"connector": "ECSharedStorageConnector", "extra": {"shared_storage_path": str(tmp_path)}}
    peer = {"connector": "ECPeerConnector", "extra": {"lease_s": 1.0}}
    theirs = saved(closing(ECSides(ECTieredConnector, {"tiers": [folder, peer]}, ECRole.PRODUCER)))
    assert theirs.worker.num_leased() == 1
    poll_until(lambda: theirs.worker.num_leased() == 0)


def test_a_way_round_is_not_waited_for_where_a_store_has_the_item_too(closing: Closing, tmp_path: Path) -> None:
    """What a consumer reported missing is saved to all tiers; he finds it in the store."""
    folder = {"connector": "ECSharedStorageConnector", "extra": {"shared_storage_path": str(tmp_path)}}
    peer = {"connector": "ECPeerConnector", "extra": {}, "write": "fallback"}
    theirs = closing(ECSides(ECTieredConnector, {"tiers": [folder, peer]}, ECRole.PRODUCER))
    theirs.scheduler.update_connector_output(ECConnectorOutput(failed_loading={key(1): "a consumer says so"}))
    step(theirs)
    saved(theirs)
    memory = theirs.worker._tiers[1]._memory  # type: ignore[attr-defined]
    assert memory.contains([key(1)]) == [True]
    assert theirs.worker.num_leased() == 0
    memory.asked([key(1)])
    assert theirs.worker.num_leased() == 1, "a consumer that cannot find it there"


def test_what_lies_in_a_store_outlives_the_encoder(closing: Closing, tmp_path: Path) -> None:
    extra = {"shared_storage_path": str(tmp_path)}
    theirs = saved(closing(ECSides(ECSharedStorageConnector, extra, ECRole.PRODUCER)))
    assert theirs.worker.num_leased() == 0
