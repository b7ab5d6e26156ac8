"""Prefix caching: what is shared, what must not be, and what is reported."""

from __future__ import annotations

import pytest

from engine.prefix_hash import root_hash
from tests.engine.harness import Bench
from tests.engine.simulated_runner import expected_answer

A, B = "a" * 64, "b" * 64
PROMPT = list(range(100, 120))


def run(bench: Bench, name: str, prompt: list[int], images: list[tuple[str, int, int]] | None = None, **more) -> int:  # type: ignore[no-untyped-def]
    """Run one request to its end; how many of its tokens were cached."""
    bench.add(name, len(prompt), images, prompt=prompt, **more)
    bench.settle()
    last = bench.last(name)
    assert last.finished
    assert last.usage is not None
    return last.usage.cached_tokens


@pytest.mark.parametrize("with_kv", [False, True])
def test_an_equal_prompt_computes_its_last_block_alone(with_kv: bool) -> None:
    bench = Bench(with_kv=with_kv)
    assert run(bench, "r1", PROMPT) == 0
    assert run(bench, "r2", PROMPT) == 16, "four of five blocks: the last token is always computed"
    assert bench.answer("r1") == bench.answer("r2") == expected_answer(PROMPT, [], 4, [])
    assert bench.scheduler.stats.counters["prefix_cache_queries_total"] == 40
    assert bench.scheduler.stats.counters["prefix_cache_hits_total"] == 16
    bench.assert_empty()


def test_a_conversation_goes_on_from_its_own_answer() -> None:
    bench = Bench()
    run(bench, "r1", PROMPT, max_tokens=9)
    assert run(bench, "r2", [*PROMPT, *bench.answer("r1"), 7, 7, 7]) == 28


def test_the_same_image_at_another_place_is_not_a_hit() -> None:
    bench = Bench()
    bench.store.stored = {A}
    tokens = [5] * 20
    assert run(bench, "r1", tokens, [(A, 4, 8)]) == 0
    assert run(bench, "r2", tokens, [(A, 5, 8)]) == 4
    assert run(bench, "r3", tokens, [(A, 4, 8)]) == 16


def test_no_look_up_is_made_for_an_image_whose_keys_and_values_are_there() -> None:
    bench = Bench(buffer_rows=8)
    bench.store.stored = {A, B}
    prompt = [*[5] * 8, *range(10, 20)]
    run(bench, "r1", prompt, [(A, 0, 8)])
    run(bench, "other", prompt, [(B, 0, 8)])
    bench.store.lookups.clear()
    assert run(bench, "r2", prompt, [(A, 0, 8)]) == 16
    assert bench.store.lookups == []


def test_tenants_share_nothing() -> None:
    bench = Bench()
    run(bench, "r1", PROMPT, tenant="one")
    assert run(bench, "r2", PROMPT, tenant="two") == 0
    assert run(bench, "r3", PROMPT, tenant="one") == 16


def test_blocks_unused_for_longest_go_first_and_their_ends_before_their_beginnings() -> None:
    bench = Bench(num_blocks=12)
    run(bench, "old", PROMPT, max_tokens=1)
    run(bench, "young", [token + 500 for token in PROMPT], max_tokens=1)
    run(bench, "large", [7] * 27, max_tokens=1)  # seven blocks, of which two were never used
    assert run(bench, "young again", [token + 500 for token in PROMPT], max_tokens=1) == 16
    assert run(bench, "old again", PROMPT, max_tokens=1) == 0


def test_blocks_that_are_shared_are_freed_with_their_last_holder() -> None:
    bench = Bench()
    run(bench, "r0", PROMPT, max_tokens=1)
    bench.add("r1", 20, prompt=PROMPT, max_tokens=30)
    bench.add("r2", 20, prompt=PROMPT, max_tokens=2)
    for _ in range(4):
        bench.step()
    assert bench.last("r2").finished
    assert not bench.last("r1").finished
    bench.settle()
    assert bench.answer("r1") == expected_answer(PROMPT, [], 30, [])
    bench.assert_empty()


def test_pulled_blocks_are_found_by_the_next_request() -> None:
    bench = Bench(with_kv=True)
    run(bench, "r1", PROMPT, hand_over=True)
    assert run(bench, "r2", PROMPT, hand_over=True) == 16
    while bench.leased:
        bench.begin()
        bench.finish(sent=list(bench.leased))
    bench.assert_empty()


def test_no_tenant_and_adapter_run_together_to_others() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("a\0b", ""), ("", "a\0b"), ("a\0", "b"), ("a", "\0b")]
    assert len({root_hash(*pair) for pair in pairs}) == len(pairs)


def test_it_can_be_turned_off() -> None:
    bench = Bench()
    bench.kv.prefix_caching = False
    run(bench, "r1", PROMPT)
    assert run(bench, "r2", PROMPT) == 0
