"""The scheduler: budgets, parking, preemption, hand-over, and that whatever ends leaves nothing behind."""

from __future__ import annotations

import random

import pytest

from core.types import FinishReason, KVHandle
from engine.protocol import ErrorKind
from tests.engine.harness import Bench
from tests.engine.simulated_runner import expected_answer

A, B, C = "a" * 64, "b" * 64, "c" * 64


def test_text_requests_share_steps_and_end_by_length() -> None:
    bench = Bench()
    bench.add("r1", 10)
    bench.add("r2", 5)
    bench.step()
    assert bench.out.num_scheduled_tokens == {"r1": 10, "r2": 5}
    bench.step()
    assert bench.out.num_scheduled_tokens == {"r1": 1, "r2": 1}
    assert bench.out.new_requests == []
    bench.settle()
    assert bench.last("r1").finish_reason is FinishReason.LENGTH
    assert bench.tokens("r1") == bench.tokens("r2") == 4
    bench.assert_empty()
    assert sorted(bench.store.ended) == ["r1", "r2"]


def test_a_long_prompt_is_chunked_beside_decodes() -> None:
    bench = Bench(budget=8)
    bench.add("short", 3, max_tokens=20)
    bench.step()
    bench.add("long", 30)
    chunks = []
    while "long" not in bench.outputs:
        out = bench.step()
        assert out.num_scheduled_tokens["short"] == 1, "a decode waits for somebody's prompt"
        chunks.append(out.num_scheduled_tokens["long"])
    assert chunks == [7, 7, 7, 7, 2]


def test_a_new_request_waits_a_moment_for_its_items_rather_than_take_a_step_for_a_few_tokens() -> None:
    bench = Bench(patience_s=60)
    bench.store.stored = {A, B}
    bench.add("r", 30, [(A, 6, 8), (B, 16, 8)])
    bench.step()
    assert bench.out.num_scheduled_tokens == {}
    assert bench.loading == [A, B]
    bench.step(loaded=[A, B])
    bench.step()
    assert bench.out.num_scheduled_tokens == {"r": 30}
    bench.settle()
    bench.assert_empty()


def test_absent_items_are_all_named_once_every_lookup_has_answered() -> None:
    bench = Bench()
    bench.store.undecided = {B}
    bench.add("r", 30, [(A, 2, 4), (B, 8, 4), (C, 14, 4)])
    bench.step()
    bench.step()
    assert "r" not in bench.outputs, "a look-up is still under way"
    bench.store.undecided = set()
    bench.step()
    assert bench.last("r").missing == [A, B, C]
    assert bench.last("r").finished
    bench.settle()
    bench.assert_empty()


def test_lookups_are_not_made_for_items_in_the_buffer_nor_in_decode_steps() -> None:
    bench = Bench()
    bench.store.stored = {A}
    bench.add("r1", 10, [(A, 0, 4)])
    bench.settle()
    bench.store.lookups.clear()
    bench.add("r2", 10, [(A, 0, 4)], max_tokens=8)
    bench.settle()
    assert bench.store.lookups == []


@pytest.mark.parametrize("buffer_rows", [8, 9, 16, 20])
def test_many_images_pass_through_a_buffer_of_one_item(buffer_rows: int) -> None:
    bench = Bench(buffer_rows=buffer_rows, num_blocks=40)
    keys = [f"{i:064x}" for i in range(12)]
    bench.store.stored = set(keys)
    for i in range(4):
        images = [(keys[(3 * i + j) % 12], 10 * j, 8) for j in range(3)]
        bench.add(f"r{i}", 35, images)
    bench.settle(400)
    assert all(bench.last(f"r{i}").finish_reason is FinishReason.LENGTH for i in range(4))
    bench.assert_empty()


def test_preemption_recomputes_and_everybody_ends() -> None:
    bench = Bench(num_blocks=12)
    for i in range(4):
        bench.add(f"r{i}", 12, max_tokens=20)
    bench.settle(400)
    counters = bench.scheduler.stats.counters
    assert counters["num_preemptions_total"] > 0
    assert counters["kv_recomputations_total"] == counters["num_preemptions_total"]
    assert [bench.tokens(f"r{i}") for i in range(4)] == [20] * 4
    bench.assert_empty()


def test_hand_over_keeps_the_blocks_until_the_lease_ends() -> None:
    bench = Bench(with_kv=True)
    bench.add("r", 10, hand_over=True)
    bench.step()
    last = bench.last("r")
    assert last.kv == KVHandle("ScriptedPeer", b"r", 10)
    assert last.new_token_ids == expected_answer(bench.prompt_of("r"), [], 1, [])
    assert last.finish_reason is None
    assert bench.scheduler.make_stats().kv_leases == 1
    assert bench.kv.pool.num_held == 3
    bench.step(sent=["r"])
    bench.assert_empty()


def test_a_prefill_that_ends_with_its_first_token_makes_no_handle() -> None:
    bench = Bench(with_kv=True)
    bench.add("r", 10, hand_over=True, max_tokens=1)
    bench.step()
    assert bench.last("r").kv is None
    assert bench.last("r").finish_reason is FinishReason.LENGTH
    bench.settle()
    bench.assert_empty()


def test_pulled_blocks_are_not_computed_again() -> None:
    bench = Bench(with_kv=True)
    bench.add("r", 10, [(A, 0, 4)], kv=KVHandle("ScriptedPeer", b"", 10), given=1)
    bench.step()
    assert bench.pulling == ["r"]
    assert bench.out.num_scheduled_tokens == {}
    bench.step(pulled=["r"])
    bench.step()
    assert bench.out.num_scheduled_tokens == {"r": 1}
    bench.settle()
    assert bench.tokens("r") == 3  # max_tokens counts the one that came with the request
    assert bench.store.lookups == []
    bench.assert_empty()


def test_a_failed_pull_is_recomputed_with_its_images() -> None:
    bench = Bench(with_kv=True)
    bench.store.stored = {A}
    bench.add("r", 10, [(A, 0, 4)], kv=KVHandle("ScriptedPeer", b"", 10), given=1)
    bench.step()
    bench.step(pull_failed={"r": "peer is gone"})
    bench.settle()
    assert bench.tokens("r") == 3
    assert bench.scheduler.stats.counters["kv_transfer_failures_total"] == 1
    assert bench.scheduler.stats.counters["kv_recomputations_total"] == 1
    bench.assert_empty()


def test_a_failed_pull_fails_where_that_is_the_policy() -> None:
    bench = Bench(with_kv=True, policy="fail")
    bench.add("r", 10, kv=KVHandle("ScriptedPeer", b"", 10), given=1)
    bench.step()
    bench.step(pull_failed={"r": "peer is gone"})
    assert bench.last("r").error_kind is ErrorKind.UNAVAILABLE
    assert "peer is gone" in bench.last("r").error
    bench.settle()
    bench.assert_empty()


def test_an_aborted_pull_keeps_its_blocks_until_the_connector_lets_go() -> None:
    bench = Bench(with_kv=True)
    bench.add("r", 10, kv=KVHandle("ScriptedPeer", b"", 10), given=1)
    bench.step()
    bench.scheduler.abort("r")
    bench.scheduler.abort("r")
    bench.step()
    assert bench.cancelled == ["r"]
    assert bench.kv.pool.num_held == 3
    bench.step(pull_failed={"r": "cancelled"})
    bench.assert_empty()
    assert "r" not in bench.outputs
    assert bench.scheduler.stats.counters["kv_recomputations_total"] == 0


def test_a_handle_that_does_not_fit_the_request_is_refused() -> None:
    bench = Bench(with_kv=True)
    bench.add("r", 10, kv=KVHandle("ScriptedPeer", b"", 9), given=1)
    bench.step()
    assert bench.last("r").error_kind is ErrorKind.INVALID_REQUEST
    bench.assert_empty()


def test_equal_images_are_encoded_once() -> None:
    bench = Bench()
    bench.encode("e1", A, 4)
    bench.encode("e2", A, 4)
    bench.step()
    bench.step(prepared=[A])
    bench.step()
    bench.step(saved=[A])
    assert [bench.last("e1").encoded_cached, bench.last("e2").encoded_cached] == [False, True]
    bench.encode("e3", A, 4)
    bench.step()
    assert bench.last("e3").encoded_cached
    assert bench.scheduler.stats.counters["vision_tower_images_total"] == 1
    bench.assert_empty()


def test_the_source_of_an_item_goes_from_the_producers_connector_to_the_consumers() -> None:
    bench = Bench()
    bench.encode("e1", A, 4)
    bench.settle()
    assert bench.last("e1").item_source == f"from {A[:4]}"
    bench.encode("e2", A, 4)  # found in the store
    bench.settle()
    assert bench.last("e2").item_source == f"from {A[:4]}"
    bench.add("r1", 8, [(B, 2, 4)], source="there")
    assert bench.store.sources == {B: "there"}


def test_what_a_connector_counts_becomes_the_engines_counters() -> None:
    bench = Bench()
    bench.add("r1", 4)
    bench.store.counters = {"breaker_opens": 2, "lookup_failures": 3, "of its own": 1}
    bench.settle()
    counters = bench.scheduler.stats.counters
    assert counters["ec_store_breaker_opens_total"] == 2
    assert counters["ec_store_lookup_failures_total"] == 3


def test_an_item_reported_missing_is_stored_again_without_the_tower() -> None:
    bench = Bench()
    bench.encode("e1", A, 4)
    bench.settle()
    bench.encode("e2", A, 4, reported_missing=True)
    bench.settle()
    assert bench.last("e2").finished
    assert bench.last("e2").error_kind is None
    assert bench.scheduler.stats.counters["vision_tower_images_total"] == 1
    bench.assert_empty()


def test_a_store_that_does_not_take_the_item_is_named() -> None:
    bench = Bench()
    bench.encode("e1", A, 4)
    bench.step()
    bench.step(prepared=[A])
    bench.step()
    bench.step(save_failed=[A])
    assert bench.last("e1").error_kind is ErrorKind.UNAVAILABLE
    assert "disk full" in bench.last("e1").error
    bench.assert_empty()


def test_images_are_batched_by_budget_and_at_least_one_runs() -> None:
    bench = Bench(budget=10, buffer_rows=64)
    keys = [f"{i:064x}" for i in range(4)]
    for key, rows in zip(keys, [6, 4, 3, 20], strict=True):
        bench.encode(f"e-{key}", key, rows)
    bench.step()
    bench.step(prepared=keys)
    batches = []
    for _ in range(3):
        bench.step()
        batches.append([image.feature.num_embeds for image in bench.out.encode])
    assert batches == [[6, 4], [3], [20]]
    bench.settle()


def test_an_aborted_image_is_forgotten_unless_the_tower_has_it() -> None:
    bench = Bench()
    bench.encode("e1", A, 4)
    bench.encode("e2", B, 4)
    bench.step()
    bench.scheduler.abort("e1")
    bench.step(prepared=[B])
    assert bench.out.forget_prepared == [A]
    bench.step()
    bench.scheduler.abort("e2")
    bench.step(saved=[B])
    bench.assert_empty()
    assert not bench.scheduler.has_work


def test_what_never_fits_and_what_is_too_much_is_refused_by_name() -> None:
    bench = Bench(buffer_rows=4, max_waiting=1)
    bench.encode("large", A, 5)
    bench.add("wide", 10, [(A, 0, 5)])
    bench.add("ok", 10)
    bench.add("late", 10)
    bench.step()
    assert bench.last("large").error_kind is ErrorKind.INVALID_REQUEST
    assert "--encoder-cache-bytes" in bench.last("wide").error
    assert bench.last("late").error_kind is ErrorKind.OVERLOADED
    assert bench.last("late").retry_after_s == 1.0, "nothing has ended yet, so it is a guess"
    bench.settle()
    bench.assert_empty()


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_leave_nothing_behind(seed: int) -> None:
    """Requests of every kind, with loads, pulls and saves that end late or fail, and aborts at any moment."""
    draw = random.Random(seed)
    bench = Bench(num_blocks=20, buffer_rows=20, max_num_seqs=4, budget=16, with_kv=True)
    keys = [f"{i:064x}" for i in range(6)]
    live: list[str] = []
    for turn in range(300):
        if turn < 220 and draw.random() < 0.3:
            name = f"r{turn}"
            kind = draw.random()
            if kind < 0.3:
                bench.encode(name, draw.choice(keys), draw.randint(4, 4))
            else:
                pulled = kind < 0.5
                images = [(draw.choice(keys), 2 + 6 * i, 4) for i in range(draw.randint(0, 3))]
                bench.add(
                    name,
                    24,
                    images,
                    max_tokens=draw.randint(2, 12),
                    hand_over=kind > 0.8,
                    kv=KVHandle("ScriptedPeer", b"", 24) if pulled else None,
                    given=1 if pulled else 0,
                )
            live.append(name)
        if live and draw.random() < 0.1:
            bench.scheduler.abort(draw.choice(live))

        def some(names: list[str]) -> list[str]:
            taken = [name for name in names if draw.random() < 0.4]
            for name in taken:
                names.remove(name)
            return taken

        loaded, failed = some(bench.loading), some(bench.loading)
        saved, unsaved = some(bench.saving), some(bench.saving)
        pulled_now, lost = some(bench.pulling), some(bench.pulling)
        bench.step(
            loaded=loaded,
            load_failed=failed,
            prepared=some(bench.preparing),
            saved=saved,
            save_failed=unsaved,
            pulled=pulled_now,
            pull_failed=dict.fromkeys(lost, "lost"),
            sent=some(bench.leased),
        )
    bench.settle(500)
    bench.step(sent=bench.leased)
    bench.check(bench.out)
    bench.assert_empty()
