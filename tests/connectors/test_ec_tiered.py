"""ECTieredConnector: which tier is asked, loaded from and written to, when one fails, hangs or is full."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from connectors.ec.base import MAX_SOURCE_CHARS, ECConnectorConfig, ECConnectorOutput, ECSide
from connectors.ec.tiered import ECTieredConnector
from core.errors import ConfigError
from core.types import ECRole
from tests.connectors import ec_scripted_tier
from tests.connectors.ec_scripted_tier import STORES, ScriptedStore
from tests.connectors.support import (
    DEADLINE_S,
    NAMESPACE,
    ECSides,
    connector_threads,
    key,
    poll_until,
    random_bits,
    same_bits,
)

Closing = Callable[[ECSides], ECSides]
EMBEDS = random_bits(7, 6, torch.float32)


@pytest.fixture
def a() -> Iterator[ScriptedStore]:
    yield from _store("a")


@pytest.fixture
def b() -> Iterator[ScriptedStore]:
    yield from _store("b")


def _store(name: str) -> Iterator[ScriptedStore]:
    STORES[name] = ScriptedStore()
    yield STORES[name]
    STORES.pop(name).go_on()


def tier(name: str, write: str = "through") -> dict[str, Any]:
    module = ec_scripted_tier.__name__
    return {"connector": "ScriptedConnector", "module_path": module, "extra": {"store": name}, "write": write}


def tiered(*tiers: dict[str, Any], role: ECRole = ECRole.BOTH, **extra: Any) -> ECSides:
    return ECSides(ECTieredConnector, {"tiers": list(tiers), **extra}, role)


def tier_failures(sides: ECSides) -> int:
    return sides.worker.take_counters()["tier_failures"]


# ---- look-ups and loads ----


def test_the_first_tier_that_has_it_is_loaded_from_and_the_others_are_left_alone(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    sides = closing(tiered(tier("a"), tier("b")))
    assert sides.save(key(1), EMBEDS).finished_saving == [key(1)]
    assert key(1) in a.items
    assert key(1) in b.items
    b.calls.clear()
    assert sides.look_up(key(1)) is True
    output = sides.load(key(1), 3, 7)
    assert (output.finished_loading, output.bytes_loaded, len(output.seconds_loading)) == ([key(1)], EMBEDS.nbytes, 1)
    assert same_bits(sides.buffer[3:10], EMBEDS)
    assert b.calls == [], "a healthy first tier costs the second nothing"
    assert tier_failures(sides) == 0


def test_a_look_up_is_answered_by_all_tiers_together(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    sides = closing(tiered(tier("a"), tier("b")))
    a.looking = {key(2)}
    b.looking = {key(2), key(3)}
    a.items[key(0)] = b.items[key(1)] = EMBEDS
    assert [sides.scheduler.has_cache_item(key(n)) for n in range(5)] == [True, True, None, None, False]
    assert sides.scheduler.ensure_cache_available([key(0)]) is True
    assert sides.scheduler.ensure_cache_available([key(0), key(4)]) is False


def test_a_faster_tier_is_waited_for_but_not_for_long(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    sides = closing(tiered(tier("a"), tier("b"), promote=False))
    for store in (a, b):
        store.items[key(1)] = EMBEDS
    a.looking = {key(1)}
    assert sides.scheduler.has_cache_item(key(1)) is None
    a.looking = set()
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]
    assert (a.count("load"), b.count("load")) == (1, 0), "the slower one was quicker with its answer"
    a.looking = {key(1)}
    poll_until(lambda: sides.scheduler.has_cache_item(key(1)) is True)
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]
    assert (a.count("load"), b.count("load")) == (1, 1)


def test_what_comes_from_a_slower_tier_is_promoted(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    b.items[key(1)] = EMBEDS
    sides = closing(tiered(tier("a"), tier("b"), role=ECRole.CONSUMER))
    assert sides.look_up(key(1)) is True
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]
    assert same_bits(a.items[key(1)], EMBEDS)
    assert b.count("save") == 0
    assert sides.load(key(1), 8, 7).finished_loading == [key(1)]
    assert b.count("load") == 1
    assert tier_failures(sides) == 0
    assert a.roles == ["ec_both"] * 2, "a tier that is promoted into is written to"
    assert b.roles == ["ec_consumer"] * 2


def test_a_promotion_delays_no_report_and_reads_none_of_the_buffer(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    b.items[key(1)] = EMBEDS
    a.hangs = True
    sides = closing(tiered(tier("a"), tier("b")))
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]
    sides.buffer.zero_()  # the engine's again
    a.go_on()
    assert same_bits(a.items[key(1)], EMBEDS)


@pytest.mark.parametrize("extra", [{"promote": False}, {"copy_bytes": EMBEDS.nbytes - 1}], ids=str)
def test_nothing_is_promoted_where_there_is_no_room_or_no_wish(
    closing: Closing, a: ScriptedStore, b: ScriptedStore, extra: dict[str, Any]
) -> None:
    b.items[key(1)] = EMBEDS
    sides = closing(tiered(tier("a"), tier("b"), **extra))
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]
    assert a.count("save") == 0
    assert "ec-tier-copies" not in connector_threads()


def test_a_load_that_fails_goes_on_to_the_next_tier(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    for store in (a, b):
        store.items[key(1)] = EMBEDS
    a.fails = {"load"}
    sides = closing(tiered(tier("a"), tier("b"), promote=False))
    output = sides.load(key(1), 0, 7)
    assert (output.finished_loading, output.failed_loading) == ([key(1)], {})
    assert same_bits(sides.buffer[:7], EMBEDS)
    assert tier_failures(sides) == 1


def test_a_load_that_hangs_and_then_fails_goes_on_to_the_next_tier(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    for store in (a, b):
        store.items[key(1)] = EMBEDS
    a.fails, a.hangs = {"load"}, True
    sides = closing(tiered(tier("a"), tier("b"), promote=False))
    threading.Timer(0.1, a.go_on).start()
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]
    assert same_bits(sides.buffer[:7], EMBEDS)


def test_a_load_that_fails_everywhere_says_why_for_each_tier(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    for store in (a, b):
        store.items[key(1)] = EMBEDS
        store.fails = {"load"}
    sides = closing(tiered(tier("a"), tier("b")))
    reason = sides.load(key(1), 0, 7).failed_loading[key(1)]
    assert reason == "ScriptedConnector: scripted failure; ScriptedConnector#2: scripted failure"
    assert tier_failures(sides) == 0, "nobody made it good"
    assert sides.load(key(2), 0, 7).failed_loading == {key(2): "no tier has the item"}


def test_a_tier_that_raises_has_failed(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    for store in (a, b):
        store.items[key(1)] = EMBEDS
    a.raises = {"load", "save"}
    sides = closing(tiered(tier("a"), tier("b"), promote=False))
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]
    assert sides.save(key(2), EMBEDS).finished_saving == [key(2)]
    assert tier_failures(sides) == 2


# ---- saves ----


def test_a_save_that_one_tier_failed_at_is_saved(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    a.fails = {"save"}
    sides = closing(tiered(tier("a"), tier("b")))
    output = sides.save(key(1), EMBEDS)
    assert (output.finished_saving, output.failed_saving, output.bytes_saved) == ([key(1)], {}, EMBEDS.nbytes)
    assert tier_failures(sides) == 1
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]


def test_a_save_that_every_tier_failed_at_says_why(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    a.fails = b.fails = {"save"}
    for write in ("through", "back", "fallback"):
        sides = closing(tiered(tier("a"), tier("b", write)))
        reason = sides.save(key(1), EMBEDS).failed_saving[key(1)]
        assert reason == "ScriptedConnector: scripted failure; ScriptedConnector#2: scripted failure"
        assert tier_failures(sides) == 0


def test_a_save_through_waits_for_every_tier(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    b.hangs = True
    sides = closing(tiered(tier("a"), tier("b")))
    sides.worker.save_caches(key(1), EMBEDS)
    assert not sides.worker.get_finished()
    b.go_on()
    assert sides.report().finished_saving == [key(1)]


def test_a_save_back_is_reported_before_the_slow_tier_has_it(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    b.hangs = True
    sides = closing(tiered(tier("a"), tier("b", "back")))
    embeds = EMBEDS.clone()
    assert sides.save(key(1), embeds).finished_saving == [key(1)]
    assert key(1) not in b.items
    embeds.zero_()  # the engine's again
    b.go_on()
    assert same_bits(b.items[key(1)], EMBEDS)
    assert tier_failures(sides) == 0
    poll_until(lambda: _settled(sides))


def _settled(sides: ECSides) -> bool:
    """No copy is kept."""
    sides.worker.get_finished()
    return sides.worker._host._used_bytes == 0  # type: ignore[attr-defined, no-any-return]


def test_a_save_back_that_fails_is_counted(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    b.fails = {"save"}
    sides = closing(tiered(tier("a"), tier("b", "back")))
    assert sides.save(key(1), EMBEDS).finished_saving == [key(1)]
    poll_until(lambda: _settled(sides))
    assert tier_failures(sides) == 1


def test_where_the_copies_take_too_much_memory_a_save_back_waits(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    b.hangs = True
    sides = closing(tiered(tier("a"), tier("b", "back"), copy_bytes=EMBEDS.nbytes))
    assert sides.save(key(1), EMBEDS).finished_saving == [key(1)]
    sides.worker.save_caches(key(2), EMBEDS)
    assert not sides.worker.get_finished().finished_saving
    b.go_on()
    assert sides.report().finished_saving == [key(2)]
    assert {key(1), key(2)} == set(b.items)


def test_if_the_first_tier_fails_a_back_tier_is_written_before_the_report(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    a.fails = {"save"}
    sides = closing(tiered(tier("a"), tier("b", "back")))
    assert sides.save(key(1), EMBEDS).finished_saving == [key(1)]
    assert same_bits(b.items[key(1)], EMBEDS)
    assert b.count("save") == 1
    assert tier_failures(sides) == 1
    poll_until(lambda: _settled(sides))


def test_close_writes_back_what_it_can_in_its_time(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    b.hangs = True
    sides = closing(tiered(tier("a"), tier("b", "back")))
    sides.save(key(1), EMBEDS)
    timer = threading.Timer(0.2, b.go_on)
    timer.start()
    sides.close()
    assert key(1) in b.items
    timer.join()


def test_close_does_not_wait_for_a_tier_that_hangs(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    b.hangs = True
    sides = closing(tiered(tier("a"), tier("b", "back")))
    sides.save(key(1), EMBEDS)
    begin_s = time.monotonic()
    sides.close()
    assert time.monotonic() - begin_s < DEADLINE_S / 2
    assert all(tier.num_closes == 1 for tier in sides.worker._tiers)  # type: ignore[attr-defined]


def test_a_fallback_is_written_to_only_when_the_others_failed(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    sides = closing(tiered(tier("a"), tier("b", "fallback")))
    assert sides.save(key(1), EMBEDS).finished_saving == [key(1)]
    assert b.count("save") == 0
    a.fails = {"save"}
    assert sides.save(key(2), EMBEDS).finished_saving == [key(2)]
    assert same_bits(b.items[key(2)], EMBEDS)
    assert tier_failures(sides) == 1
    assert sides.load(key(2), 0, 7).finished_loading == [key(2)]
    assert a.count("save") == 2, "what came over a way round is not promoted"
    a.fails = set()
    assert sides.save(key(3), EMBEDS).finished_saving == [key(3)]
    assert b.count("save") == 1


def test_two_orders_for_one_key_are_never_under_way_at_one_tier(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    """A save comes while the promotion of the same item hangs."""
    b.items[key(1)] = EMBEDS
    a.hangs = True
    sides = closing(tiered(tier("a"), tier("b")))
    assert sides.load(key(1), 0, 7).finished_loading == [key(1)]
    assert a.count("save") == 1
    sides.worker.save_caches(key(1), EMBEDS)
    assert a.count("save") == 1
    a.go_on()
    assert sides.report().finished_saving == [key(1)]
    assert a.count("save") == 2


# ---- what was reported missing ----


def test_an_item_that_was_reported_missing_is_made_again_and_saved_everywhere(
    closing: Closing, a: ScriptedStore, b: ScriptedStore
) -> None:
    """The encoder sees it in a tier that its consumer cannot reach."""
    sides = closing(tiered(tier("a"), tier("b", "fallback")))
    sides.save(key(1), EMBEDS)
    assert sides.look_up(key(1)) is True
    sides.scheduler.update_connector_output(ECConnectorOutput(failed_loading={key(1): "reported missing"}))
    sides.worker.bind_connector_metadata(sides.scheduler.build_connector_meta())
    sides.worker.start_load_caches()
    assert sides.save(key(1), EMBEDS).finished_saving == [key(1)]
    assert same_bits(b.items[key(1)], EMBEDS)
    assert sides.look_up(key(1)) is True
    sides.save(key(1), EMBEDS)
    assert b.count("save") == 1, "once"
    assert tier_failures(sides) == 0


def test_a_consumer_whose_own_load_failed_goes_on_asking(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    sides = closing(tiered(tier("a"), tier("b")))
    a.fails = {"load"}
    a.items[key(1)] = EMBEDS
    assert key(1) in sides.load(key(1), 0, 7).failed_loading
    assert sides.look_up(key(1)) is True


# ---- sources, configuration ----


def test_each_tier_gets_its_own_source(closing: Closing, a: ScriptedStore, b: ScriptedStore) -> None:
    sides = closing(tiered(tier("a"), tier("b")))
    assert sides.scheduler.item_source(key(1)) == ""
    b.source = 'tcp://"b"'
    source = sides.scheduler.item_source(key(1))
    assert source.isprintable()
    sides.scheduler.add_item_source(key(1), source)
    assert (a.heard, b.heard) == ([], [(key(1), 'tcp://"b"')])
    a.source = "x" * MAX_SOURCE_CHARS
    assert sides.scheduler.item_source(key(1)) == source, "one that does not fit is left out"
    a.source = "x" * 500
    assert len(sides.scheduler.item_source(key(1))) <= MAX_SOURCE_CHARS


@pytest.mark.parametrize(
    "source",
    ["", "x", "[]", "{", '{"ScriptedConnector": 1}', '{"ScriptedConnector": "' + "x" * 2000 + '"}', "[" * 1000],
)
def test_what_is_no_source_is_not_taken(closing: Closing, a: ScriptedStore, source: str) -> None:
    sides = closing(tiered(tier("a")))
    sides.scheduler.add_item_source(key(1), source)
    sides.scheduler.add_item_source(key(1), json.dumps({"Another": "x"}))
    assert a.heard == []


NESTED = {"connector": "ECTieredConnector", "extra": {"tiers": [{"connector": "ECPeerConnector"}]}}
PEER = {"connector": "ECPeerConnector"}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ["tiers", "required"]),
        ({"tiers": []}, ["tiers"]),
        ({"tiers": [PEER] * 9}, ["tiers"]),
        ({"tiers": {"connector": "ECPeerConnector"}}, ["tiers"]),
        ({"tiers": [{"extra": {}}]}, ["tiers", "connector"]),
        ({"tiers": [{**PEER, "colour": "red"}]}, ["tiers", "colour"]),
        ({"tiers": [{**PEER, "write": "sometimes"}]}, ["tiers", "sometimes"]),
        ({"tiers": [{**PEER, "write": "fallback"}]}, ["tiers[0]", "write", "through"]),
        ({"tiers": [{**PEER, "write": "back"}]}, ["tiers[0]", "write", "through"]),
        ({"tiers": [PEER, {"connector": "ECNoSuch"}]}, ["tiers[1]", "ECNoSuch", "unknown connector"]),
        ({"tiers": [PEER, {**PEER, "module_path": "no.such"}]}, ["tiers[1]", "no.such"]),
        ({"tiers": [PEER, {**PEER, "extra": {"port": -1}}]}, ["tiers[1]", "ECPeerConnector", "port=-1"]),
        ({"tiers": [PEER, {**PEER, "extra": {"host": "256.0.0.1.invalid"}}]}, ["tiers[1]", "host", "cannot bind"]),
        ({"tiers": [PEER, NESTED]}, ["tiers[1]", "ECTieredConnector", "tiers within tiers"]),
        ({"tiers": [PEER], "copy_bytes": -1}, ["copy_bytes"]),
        ({"tiers": [PEER], "levels": 1}, ["levels", "unknown key"]),
    ],
    ids=str,
)
def test_what_the_operator_wrote_wrongly_is_named(extra: dict[str, Any], words: list[str]) -> None:
    config = ECConnectorConfig(ECRole.BOTH, NAMESPACE, torch.float32, 6, extra, lambda: None)
    with pytest.raises(ConfigError) as caught:
        ECTieredConnector(config, ECSide.WORKER)
    for word in ("--ec-connector-extra-config", *words):
        assert word in str(caught.value)
    assert connector_threads() == [], "the tiers that had been made are closed"
