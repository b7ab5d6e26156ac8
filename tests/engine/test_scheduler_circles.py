"""Requests that hold what others wait for: each of these once waited for ever, or as long as newcomers came."""

from __future__ import annotations

import time

import pytest

from core.types import KVHandle
from tests.engine.harness import Bench

A, B, C = "a" * 64, "b" * 64, "c" * 64


def through(bench: Bench, *names: str) -> bool:
    return all(name in bench.outputs and bench.last(name).finished for name in names)


def advance(bench: Bench) -> None:
    """A step, with which whatever was in the background before it ends."""
    bench.step(loaded=list(bench.loading), prepared=list(bench.preparing), saved=list(bench.saving))


def test_the_first_takes_the_row_of_one_that_lacks_the_first_one_s_blocks() -> None:
    """`early` was pulled into most of the blocks and lacks a row; `late` has the only row and lacks blocks."""
    bench = Bench(num_blocks=12, buffer_rows=16, max_num_seqs=1, budget=40, with_kv=True)
    bench.store.stored = {A}
    bench.add("early", 32, max_tokens=4, kv=KVHandle("ScriptedPeer", b"", 32), given=1)
    bench.step()
    bench.add("late", 20, [(A, 2, 16)], max_tokens=2)
    bench.step()
    bench.step(loaded=[A], pulled=["early"])
    bench.settle()
    assert through(bench, "early", "late")
    assert bench.scheduler.stats.counters["num_preemptions_total"] == 1
    bench.assert_empty()


def test_a_row_is_not_taken_from_one_that_can_go_on() -> None:
    """As above with blocks for both: `late` passes `early`, and nobody computes anything twice."""
    bench = Bench(num_blocks=20, buffer_rows=16, max_num_seqs=1, budget=40, with_kv=True)
    bench.store.stored = {A}
    bench.add("early", 32, max_tokens=4, kv=KVHandle("ScriptedPeer", b"", 32), given=1)
    bench.step()
    bench.add("late", 20, [(A, 2, 16)], max_tokens=2)
    bench.step()
    bench.step(loaded=[A], pulled=["early"])
    bench.settle()
    assert through(bench, "early", "late")
    assert bench.scheduler.stats.counters["num_preemptions_total"] == 0


def test_an_image_inside_which_a_prefix_hit_ends_is_let_go_while_its_request_waits() -> None:
    """`second` holds A and waits for the row; `first` has the row and waits for the room of B."""
    bench = Bench(buffer_rows=12, max_num_seqs=1, budget=40)
    bench.store.stored = {A, B, C}
    prompt = [5] * 3 + [7] * 12 + [1, 2, 3]
    bench.add("warm", 18, [(A, 3, 12)], prompt=prompt, max_tokens=1)
    bench.settle()
    bench.add("evict", 14, [(C, 1, 12)], max_tokens=1)
    bench.settle()
    bench.add("second", 18, [(A, 3, 12)], prompt=[*prompt[:15], 9, 9, 9], max_tokens=2, priority=1)
    bench.step()
    assert bench.scheduler._requests["second"].num_computed_tokens == 12, "the hit ends inside A"
    bench.add("first", 20, [(B, 6, 12)], max_tokens=2)
    bench.settle()
    assert through(bench, "first", "second")
    bench.assert_empty()


def test_an_image_that_nobody_waits_for_does_not_bar_the_way_of_a_smaller_one_behind_it() -> None:
    """`first` has the row and waits for B, which stands behind A in the encoder's queue; there is no room for A while
    `second` holds C and waits for the row."""
    bench = Bench(buffer_rows=16, max_num_seqs=1, budget=40)
    bench.store.stored = {C}
    bench.add("second", 12, [(C, 0, 9)], max_tokens=2, priority=1)
    bench.step()
    bench.add("first", 8, [(B, 2, 1)], max_tokens=2)
    bench.encode("large", A, 10)
    bench.encode("small", B, 1)
    bench.settle()
    assert through(bench, "first", "second", "large", "small")
    bench.assert_empty()


@pytest.mark.parametrize("rows", [8, 24, 32])
def test_a_stream_of_loads_does_not_starve_the_encoder(rows: int) -> None:
    bench = Bench(buffer_rows=32, num_blocks=512)
    for i in range(200):
        key = f"{i:064x}"
        bench.store.stored.add(key)
        if len(bench.scheduler._requests) < 4:
            bench.add(f"r{i}", 12, [(key, 2, 8)], max_tokens=2)
        if i == 20:
            bench.encode("large", A, rows)
        advance(bench)
        if through(bench, "large"):
            break
    assert i < 40
    bench.settle()
    bench.assert_empty()


def test_a_stream_of_images_to_encode_does_not_starve_a_request() -> None:
    bench = Bench(buffer_rows=32, num_blocks=512)
    bench.store.stored = {A}
    for i in range(200):
        for k in range(8 - len(bench.scheduler.encodes)):
            bench.encode(f"e{i}-{k}", f"{10 * i + k:064x}", 8)
        if i == 20:
            bench.add("r", 40, [(A, 2, 32)], max_tokens=2)
        advance(bench)
        if through(bench, "r"):
            break
    assert i < 40
    bench.settle()
    bench.assert_empty()


def test_images_that_all_find_room_in_their_turn_do_not_hold_off_a_new_request() -> None:
    """One of them lacks room in every step, but no one for long."""
    bench = Bench(buffer_rows=8, num_blocks=512)
    bench.store.stored = {A}
    for i in range(200):
        for k in range(4 - len(bench.scheduler.encodes)):
            bench.encode(f"e{i}-{k}", f"{10 * i + k:064x}", 7)
        if i == 100:
            bench.add("r", 4, [(A, 1, 1)], max_tokens=1)
        advance(bench)
    assert through(bench, "r")


@pytest.mark.parametrize("who", ["request", "image"])
def test_newcomers_to_an_item_that_all_share_do_not_keep_it_in_the_buffer_for_ever(who: str) -> None:
    """Each ends within a step that also begins the next, so that at every moment one is in the middle of the item."""
    bench = Bench(buffer_rows=12, num_blocks=512, budget=6)
    bench.store.stored = {A, B}
    bench.add("warm", 9, [(A, 0, 8)], max_tokens=1)
    bench.settle()
    bench.add("shift", 5, max_tokens=1)
    for i in range(400):
        for k in range(4 - len(bench.scheduler._requests)):
            bench.add(f"r{i}-{k}", 9, [(A, 0, 8)], max_tokens=1, priority=1)
        if i == 20 and who == "image":
            bench.encode("late", C, 12)
        elif i == 20:
            bench.add("late", 16, [(B, 0, 12)], max_tokens=1, priority=0)
        advance(bench)
        if through(bench, "late"):
            break
    assert through(bench, "late")
    bench.settle()
    bench.assert_empty()


def test_where_many_are_parked_nobody_loses_blocks_for_one_that_may_not_park_either() -> None:
    bench = Bench(max_num_seqs=1, with_kv=True)
    prompt = list(range(8))
    bench.add("warm", 8, prompt=prompt, max_tokens=2)
    bench.settle()
    bench.store.undecided = {A}
    for i in range(4):
        bench.add(f"r{i}", 12, [(A, 8, 4)], prompt=[*prompt, 5, 5, 5, 5], max_tokens=2, priority=1)
    bench.step()
    assert len(bench.scheduler._lists.parked) == bench.scheduler.settings.max_parked
    assert bench.scheduler.make_stats().kv_blocks_held == 2
    bench.add("p", 10, kv=KVHandle("ScriptedPeer", b"", 10), given=1, max_tokens=2)
    bench.step()
    assert bench.scheduler.stats.counters["num_preemptions_total"] == 0
    bench.store.stored, bench.store.undecided = {A}, set()
    bench.settle()
    assert bench.scheduler.stats.counters["num_preemptions_total"] == 0
    bench.assert_empty()


def test_a_clock_that_is_set_back_makes_nobody_patient_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patient request waits for all its items at once, and the buffer holds one of the two."""
    bench = Bench(buffer_rows=8, patience_s=0.02)
    bench.store.stored = {A, B}
    bench.add("r", 40, [(A, 2, 8), (B, 20, 8)])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    give_up_s = time.monotonic() + 5
    while bench.scheduler.has_work and time.monotonic() < give_up_s:
        advance(bench)
    assert through(bench, "r")


def test_a_parked_request_ages_among_newcomers_of_higher_priority() -> None:
    """They take the room that it waits for, whenever some comes free."""
    bench = Bench(buffer_rows=8, aging_s=0.02)
    bench.store.stored = {A}
    bench.add("low", 14, [(A, 4, 8)], priority=2, max_tokens=1)
    give_up_s = time.monotonic() + 5
    i = 0
    while not through(bench, "low") and time.monotonic() < give_up_s:
        for _ in range(6 - len(bench.scheduler._requests)):
            i += 1
            bench.store.stored.add(f"{i:064x}")
            bench.add(f"high-{i}", 5, [(f"{i:064x}", 0, 4)], max_tokens=1)
        advance(bench)
    assert through(bench, "low")
    bench.settle()
    bench.assert_empty()


def test_a_clock_that_is_set_back_does_not_stop_aging(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_num_seqs=1, aging_s=0.02)
    bench.add("low", 4, priority=2, max_tokens=1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    give_up_s = time.monotonic() + 5
    i = 0
    while not through(bench, "low") and time.monotonic() < give_up_s:
        i += 1
        bench.add(f"high-{i}", 4, max_tokens=1)
        bench.step()
    assert through(bench, "low")
