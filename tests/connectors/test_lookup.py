"""LookupTable: never waits, asks in batches, stays within its bound, and always delivers its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from connectors.ec import lookup
from connectors.ec.lookup import LookupTable
from tests.connectors.support import DEADLINE_S, Bell


class Store:
    """A store that answers when it is let, and remembers how it was asked."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.batches: list[list[str]] = []
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()

    def probe(self, keys: list[str]) -> list[bool]:
        self.batches.append(keys)
        self.asked.set()
        assert self.open.wait(DEADLINE_S)
        return [key in self.present for key in keys]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def table(store: Store, bell: Bell) -> Iterator[LookupTable]:
    table = LookupTable(
        store.probe, bell, positive_ttl_s=60, negative_ttl_s=0, timeout_s=60, on_timeout=bell, max_entries=8
    )
    yield table
    store.open.set()
    table.close(DEADLINE_S)
    assert not table._thread.is_alive()


def test_questions_that_come_meanwhile_go_out_together(table: LookupTable, store: Store, bell: Bell) -> None:
    store.open.clear()
    assert table.ask("0") is None
    assert store.asked.wait(DEADLINE_S)
    for key in "12345":
        assert table.ask(key) is None
        assert table.ask(key) is None
    store.open.set()
    bell.wait_for(lambda: table.ask("5") is False)
    assert [sorted(batch) for batch in store.batches[:2]] == [["0"], ["1", "2", "3", "4", "5"]]


def test_an_answer_is_delivered_however_late_it_is_fetched(table: LookupTable, store: Store, bell: Bell) -> None:
    """A negative answer is believed for no time at all here, as if every step took longer than that."""
    table.ask("a")
    bell.wait_for(lambda: len(table) == 1)
    assert table.ask("a") is False
    assert table.ask("a") is None, "an answer that is out of date was given again"
    bell.wait_for(lambda: len(store.batches) == 2)


def test_a_no_is_remembered_for_a_moment(store: Store, bell: Bell) -> None:
    """A request that waits for an absent item asks in every step, and the store hears of it once."""
    table = LookupTable(store.probe, bell, positive_ttl_s=60, negative_ttl_s=60, timeout_s=60, on_timeout=bell)
    bell.wait_for(lambda: table.ask("a") is False)
    store.present.add("a")
    assert [table.ask("a") for _ in range(20)] == [False] * 20
    assert store.batches == [["a"]]
    table.forget("a")  # it was stored by ourselves, or reported as missing
    bell.wait_for(lambda: table.ask("a") is True)
    table.close(DEADLINE_S)


def test_an_answer_that_nobody_fetched_goes_out_of_date(
    table: LookupTable, bell: Bell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_UNREAD_TTL_S", 0.0)
    table.ask("a")
    bell.wait_for(lambda: len(table) == 1)
    assert table.ask("a") is None


def test_a_forgotten_find_is_looked_up_again(table: LookupTable, store: Store, bell: Bell) -> None:
    store.present.add("a")
    bell.wait_for(lambda: table.ask("a"))
    assert table.ask("a") is True
    store.present.clear()
    assert table.ask("a") is True
    table.forget("a")
    assert bell.wait_for(lambda: table.ask("a") is False)


def test_memory_is_bounded_and_keeps_what_is_asked_for(table: LookupTable, store: Store, bell: Bell) -> None:
    store.present.update("abcdefghijkl")
    for key in "abcdefgh":
        bell.wait_for(partial(table.ask, key))
    assert table.ask("a") is True
    bell.wait_for(lambda: table.ask("i"))
    assert len(table) == 8
    assert table.ask("a") is True
    assert table.ask("b") is None


def test_questions_are_bounded(table: LookupTable, store: Store) -> None:
    store.open.clear()
    for n in range(100):
        assert table.ask(str(n)) is None
    assert len(table._under_way) == 8


def test_a_store_that_raises_holds_nothing(bell: Bell, caplog: pytest.LogCaptureFixture) -> None:
    def probe(keys: list[str]) -> list[bool]:
        raise OSError("gone")

    table = LookupTable(probe, bell, positive_ttl_s=60, negative_ttl_s=60, timeout_s=60, on_timeout=bell)
    assert bell.wait_for(lambda: table.ask("a") is False)
    assert bell.wait_for(lambda: table.ask("b") is False), "the thread died of it"
    table.close(DEADLINE_S)


def test_who_asks_anew_is_not_told_what_was_so_before(store: Store, bell: Bell) -> None:
    """An item was absent, is made again within a millisecond, and the request comes back."""
    table = LookupTable(store.probe, bell, positive_ttl_s=60, negative_ttl_s=60, timeout_s=60, on_timeout=bell)
    bell.wait_for(lambda: table.ask("a") is False)
    store.present.add("a")
    table.doubt("a")
    assert bell.wait_for(lambda: table.ask("a")), "a no outlived what it was true of"
    table.doubt("a")
    assert table.ask("a") is True, "what is there need not be looked up again"
    table.close(DEADLINE_S)


def test_a_no_on_its_way_is_not_for_who_comes_now(table: LookupTable, store: Store, bell: Bell) -> None:
    for num_batches in (2, 4):  # also where an older one is out of date and still remembered
        store.asked.clear()
        store.open.clear()
        assert table.ask("a") is None
        assert store.asked.wait(DEADLINE_S)
        table.doubt("a")  # the store has not said yet what it saw before
        store.open.set()
        bell.wait_for(lambda: table.ask("a") is False)
        assert len(store.batches) == num_batches


def test_those_who_come_do_not_keep_the_others_waiting_for_ever(store: Store, bell: Bell) -> None:
    """One new request a step for an absent item: the first one is answered all the same."""
    table = LookupTable(store.probe, bell, positive_ttl_s=60, negative_ttl_s=60, timeout_s=60, on_timeout=bell)

    def step() -> bool:
        table.doubt("a")
        return table.ask("a") is False

    begin_s = time.monotonic()
    bell.wait_for(step)
    assert time.monotonic() - begin_s < lookup.DOUBT_S + 5
    assert not table._doubted_since_s
    table.close(DEADLINE_S)
