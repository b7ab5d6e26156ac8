"""What must neither hang, nor spin, nor go round in circles: waits between requests, stores that lie, and floods."""

from __future__ import annotations

import pytest

from core.types import FinishReason, KVHandle, KVRole
from engine.protocol import ErrorKind
from tests.engine.harness import Bench

A, B, C = "a" * 64, "b" * 64, "c" * 64
HANDLE = KVHandle("ScriptedPeer", b"", 10)


def test_a_request_with_a_row_in_the_runner_passes_one_that_waits_for_a_row() -> None:
    """r1 was computed as far as its image and needs blocks that a pull holds; the pulled request comes before it, but
    there is only one row, which is r1's. Neither could go on."""
    bench = Bench(num_blocks=6, max_num_seqs=1, with_kv=True)
    bench.store.stored = {A}
    bench.add("r1", 20, [(A, 8, 8)], max_tokens=2)
    bench.step()
    assert bench.out.num_scheduled_tokens == {"r1": 8}
    bench.step()
    assert bench.loading == [A]
    bench.add("p", 10, kv=HANDLE, given=1, max_tokens=2)
    bench.step(loaded=[A])
    assert bench.pulling == ["p"]
    bench.step()
    assert bench.out.num_scheduled_tokens == {}, "the pull holds the blocks that r1 needs"
    bench.step(pulled=["p"])
    bench.settle()
    assert bench.last("r1").finish_reason is bench.last("p").finish_reason is FinishReason.LENGTH
    bench.assert_empty()


def test_waiting_for_blocks_under_a_lease_is_no_reason_to_step() -> None:
    bench = Bench(num_blocks=4, with_kv=True)
    bench.add("first", 12, hand_over=True)
    bench.step()
    bench.add("second", 12, max_tokens=2)
    assert bench.scheduler.can_step
    bench.step()
    assert not bench.scheduler.can_step, "the engine would spin until the lease ends"
    assert bench.scheduler.has_work
    bench.step(sent=["first"])
    assert bench.scheduler.can_step
    bench.settle()
    assert bench.last("second").finish_reason is FinishReason.LENGTH
    bench.assert_empty()


def test_what_a_load_brought_is_looked_at_without_a_pause() -> None:
    bench = Bench()
    bench.store.stored = {A}
    bench.add("r", 10, [(A, 0, 4)])
    bench.step()
    assert not bench.scheduler.can_step
    bench.step(loaded=[A])
    assert bench.scheduler.can_step
    bench.encode("e", B, 4)
    bench.settle()


def test_an_item_that_is_listed_but_cannot_be_loaded_is_named_instead_of_loaded_for_ever() -> None:
    bench = Bench()
    bench.store.stored = {A, B}
    bench.store.update_connector_output = lambda output: None  # type: ignore[method-assign]
    bench.add("r", 20, [(A, 0, 4), (B, 8, 4)])
    bench.step()
    bench.step(load_failed=[A], loaded=[B])
    for _ in range(3):
        bench.step()
    assert bench.last("r").missing == [A]
    assert bench.scheduler.stats.counters["ec_load_failures_total"] == 1
    bench.add("later", 10, [(A, 0, 4)])
    bench.step()
    assert bench.loading == [A], "the next request tries again"
    bench.settle()
    bench.assert_empty()
    assert bench.scheduler._items._lost == {}


def test_a_large_image_is_not_passed_for_ever_by_small_ones() -> None:
    bench = Bench(buffer_rows=10, budget=100)
    keys = [f"{i:064x}" for i in range(30)]
    for i in range(20):
        if i == 2:
            bench.encode("large", A, 10)
        bench.encode(f"small-{i}", keys[i], 4)
        # One save ends in every step, so a newcomer always finds room, and the buffer is never empty by itself.
        done = bench.saving[:1] if len(bench.saving) > 1 or not bench.out.encode else []
        bench.step(prepared=list(bench.preparing), saved=done)
    assert "large" in bench.outputs
    bench.settle()
    bench.assert_empty()


def test_a_flood_of_images_is_not_prepared_all_at_once() -> None:
    bench = Bench(budget=10, buffer_rows=64)
    for i in range(50):
        bench.encode(f"e{i}", f"{i:064x}", 5)
    bench.step()
    assert len(bench.preparing) == 8  # four steps of the tower
    bench.settle(400)
    assert len(bench.outputs) == 50
    bench.assert_empty()


@pytest.mark.parametrize(
    ("role", "hand_over"), [(KVRole.CONSUMER, True), (KVRole.PRODUCER, False)], ids=["hand-over", "pull"]
)
def test_a_worker_of_the_other_role_refuses(role: KVRole, hand_over: bool) -> None:
    import msgspec

    bench = Bench(with_kv=True)
    assert bench.peer is not None
    bench.peer.config = msgspec.structs.replace(bench.peer.config, role=role)
    if hand_over:
        bench.add("r", 10, hand_over=True)
    else:
        bench.add("r", 10, kv=HANDLE, given=1)
    bench.step()
    assert bench.last("r").error_kind is ErrorKind.INCOMPATIBLE
    assert "--kv-role" in bench.last("r").error
    bench.settle()
    bench.assert_empty()


def test_an_id_in_use_is_refused_while_anything_is_held_under_it() -> None:
    bench = Bench(with_kv=True)
    bench.add("r", 10, hand_over=True)
    bench.encode("e", A, 4)
    bench.add("r", 5)
    bench.add("e", 5)
    bench.step()
    assert [output.error_kind for output in bench.outputs["r"]].count(ErrorKind.INVALID_REQUEST) == 1
    assert bench.last("e").error_kind is ErrorKind.INVALID_REQUEST
    assert bench.scheduler.make_stats().kv_leases == 1
    bench.add("r", 5, hand_over=True)
    bench.step()
    assert bench.last("r").error == "request id r is in use"
    bench.step(sent=["r"])
    bench.settle()
    bench.assert_empty()


def test_a_picture_that_comes_back_later_does_not_take_the_room_of_the_one_between() -> None:
    """A, B and A again over a buffer that holds one: kept for its second place, A would wait for B for ever."""
    bench = Bench(buffer_rows=7, budget=6)
    bench.store.stored = {A, B}
    bench.add("r", 20, [(A, 0, 4), (B, 6, 4), (A, 12, 4)])
    bench.settle()
    assert bench.last("r").finished
    assert len(bench.answer("r")) == 4  # the simulated runner has seen each row
    bench.assert_empty()


def test_a_picture_kept_for_later_does_not_take_the_room_of_one_that_is_being_encoded() -> None:
    """As above, but B comes from the vision tower of this engine: it is the encoder that needs the room."""
    bench = Bench(buffer_rows=4, budget=6)
    bench.store.stored = {A}
    bench.add("r", 20, [(A, 0, 4), (B, 6, 4), (A, 12, 4)])
    bench.encode("e", B, 4)
    bench.settle()
    assert len(bench.answer("r")) == 4
    bench.assert_empty()


def test_the_first_in_rank_takes_the_runner_s_row_from_one_that_waits_for_the_first_one_s_item() -> None:
    """`first` has cached blocks and its item, the whole buffer, and waits for the runner's only row; the row is that of
    `second`, which waits for the buffer."""
    bench = Bench(buffer_rows=4, max_num_seqs=1)
    bench.store.stored = {A, B}
    prompt = list(range(8))
    bench.add("warm", 8, prompt=prompt, max_tokens=2)
    bench.settle()
    bench.add("first", 12, [(A, 8, 4)], prompt=[*prompt, 5, 5, 5, 5], max_tokens=3)
    bench.step()
    assert bench.loading == [A]
    bench.add("second", 20, [(B, 12, 4)], max_tokens=3)
    bench.step()
    assert bench.out.num_scheduled_tokens == {"second": 12}
    bench.step()
    bench.step(loaded=[A])
    bench.settle()
    assert len(bench.answer("first")) == len(bench.answer("second")) == 3
    assert bench.scheduler.stats.counters["num_preemptions_total"] == 1
    assert bench.ordered == [A, B], "nobody's item was taken"
    bench.assert_empty()
