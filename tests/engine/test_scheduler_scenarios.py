"""Each way that items take through the scheduler, without a KV connector and with one of either direction: statuses,
how often each item is looked up, loaded and encoded, the answers, and that nothing is left and nothing was counted."""

from __future__ import annotations

import pytest

from engine.request import RequestStatus
from tests.engine.scenes import Ask, Road, Scene

A, B, C = "a" * 64, "b" * 64, "c" * 64
TEXT = list(range(100, 120))

WAITING = RequestStatus.WAITING
FOR_ITEM = RequestStatus.WAITING_FOR_ENCODER_CACHE
RUNNING = RequestStatus.RUNNING
FINISHED = RequestStatus.FINISHED_LENGTH
FAILED = RequestStatus.FINISHED_ERROR


@pytest.fixture(params=Road, ids=[road.name.lower() for road in Road])
def road(request: pytest.FixtureRequest) -> Road:
    made: Road = request.param
    return made


def over(*images: tuple[str, int, int], length: int = 20) -> list[int]:
    """A prompt with placeholders where the images are."""
    prompt = TEXT * 3
    for _, offset, num in images:
        prompt[offset : offset + num] = [5] * num
    return prompt[:length]


def test_text_only(road: Road) -> None:
    scene = Scene(road)
    scene.ask(Ask("r", TEXT, []))
    scene.run()
    assert scene.life("r") == [WAITING, RUNNING, FINISHED]
    assert scene.store.lookups == scene.ordered == []
    scene.assert_well()


def test_an_external_hit(road: Road) -> None:
    """Computed as far as the image, parked, loaded once, sliced over two chunks, and never looked up again."""
    scene = Scene(road, budget=8)
    scene.store.stored = {A}
    scene.ask(Ask("r", over((A, 6, 10)), [(A, 6, 10)], max_tokens=9))
    assert scene.step().num_scheduled_tokens == {"r": 6}
    assert scene.step().num_scheduled_tokens == {}
    assert scene.life("r") == [WAITING, RUNNING, FOR_ITEM]
    scene.step(loaded=[A])
    scene.store.lookups.clear()
    row = scene.cache.where(A).start
    uses = [use for _ in range(2) for use in scene.step().item_uses]
    assert [(use.first_token, use.num_tokens, use.first_row - row) for use in uses] == [(6, 8, 0), (14, 2, 8)]
    scene.run()
    assert scene.life("r") == [WAITING, RUNNING, FOR_ITEM, RUNNING, FINISHED]
    assert scene.store.lookups == []
    assert scene.ordered == [A]
    assert (scene.counter("ec_hits_total"), scene.counter("vision_tower_images_total")) == (1, 0)
    scene.assert_well()


def test_a_miss_and_then_a_local_encode(road: Road) -> None:
    """The miss is named; asked again while the tower makes the item, the request waits for it and loads nothing."""
    scene = Scene(road)
    ask = Ask("r1", over((A, 0, 8)), [(A, 0, 8)])
    scene.store.undecided = {A}
    scene.ask(ask)
    scene.step()
    scene.store.undecided.clear()
    scene.run()
    assert scene.life("r1") == [WAITING, FOR_ITEM, FAILED]
    assert scene.last("r1").missing == [A]
    scene.make(A, 8)
    scene.ask(ask._replace(name="r2"))
    scene.store.lookups.clear()
    scene.step()
    assert scene.life("r2") == [WAITING, FOR_ITEM]
    scene.run()
    assert scene.life("r2") == [WAITING, FOR_ITEM, RUNNING, FINISHED]
    assert scene.ordered == []
    assert scene.counter("vision_tower_images_total") == 1
    # The request's, and the one of the encoder.
    scene.assert_well("r1", ec_misses_total=2)


def test_a_partial_hit_over_several_rounds(road: Road) -> None:
    """Each round names all that is absent, keeps what it has loaded, and the last one needs no store at all."""
    images = [(A, 2, 4), (B, 8, 4), (C, 14, 4)]
    scene = Scene(road)
    scene.store.stored = {A}
    for i, absent in enumerate(([B, C], [C], [])):
        scene.store.lookups.clear()
        scene.ask(Ask(f"round {i}", over(*images), images))
        scene.run()
        assert scene.last(f"round {i}").missing == absent
        assert scene.life(f"round {i}")[-1] is (FAILED if absent else FINISHED)
        assert set(scene.store.lookups) == ({A, B, C} if i == 0 else set(absent))
        if absent:
            scene.make(absent[0], 4)
            scene.run()
    assert scene.life("round 2") == [WAITING, RUNNING, FINISHED]
    assert scene.ordered == [A]
    assert scene.counter("vision_tower_images_total") == 2
    scene.assert_well("round 0", "round 1", ec_misses_total=2 + 1 + 2)


def test_ten_requests_at_once(road: Road) -> None:
    """Ten requests of three, with two pictures each of three: every item is loaded once."""
    scene = Scene(road, max_num_seqs=3, num_blocks=80)
    keys = [A, B, C]
    scene.store.stored = set(keys)
    asked = []
    for i in range(10):
        images = [(keys[i % 3], 3, 4), (keys[(i + 1) % 3], 9, 4)]
        asked.append(Ask(f"r{i}", [200 + i, *over(*images)[1:]], images))
    scene.ask(*asked)
    scene.run()
    assert sorted(scene.ordered) == keys
    assert scene.counter("ec_hits_total") == 3
    assert all(scene.life(ask.name)[-1] is FINISHED for ask in asked)
    scene.assert_well()


def test_no_room_in_the_encoder_buffer(road: Road) -> None:
    """While a running request holds the only room, another one's item is not loaded, and nobody is held up by it."""
    scene = Scene(road, buffer_rows=8, budget=4)
    scene.store.stored = {A, B}
    scene.ask(
        Ask("first", over((A, 0, 8)), [(A, 0, 8)]),
        Ask("second", [1, *over((B, 1, 8))[1:]], [(B, 1, 8)]),
    )
    while not scene.loading:
        scene.step()
    scene.step(loaded=[A])
    held = 0
    while scene.cache.is_ready(A):
        if scene.requests["first"].held_items:
            assert scene.ordered == [A]
            assert "second" not in scene.step().num_scheduled_tokens
            held += 1
        else:
            scene.step()
    assert held >= 1
    scene.run()
    assert scene.ordered == [A, B]
    assert scene.counter("ec_evictions_total") == 1
    assert FOR_ITEM in scene.life("second")
    scene.assert_well()


def test_deferral(road: Road) -> None:
    """A look-up that takes its time parks its request; another one computes meanwhile."""
    scene = Scene(road)
    scene.store.undecided = {A}
    scene.ask(Ask("slow", over((A, 0, 8)), [(A, 0, 8)]), Ask("text", [9, *TEXT], []))
    while not scene.requests["text"].status.finished:
        assert "slow" not in scene.step().num_scheduled_tokens
    assert scene.life("slow") == [WAITING, FOR_ITEM]
    assert scene.ordered == []
    scene.store.undecided, scene.store.stored = set(), {A}
    scene.run()
    assert scene.life("slow") == [WAITING, FOR_ITEM, RUNNING, FINISHED]
    assert scene.ordered == [A]
    scene.assert_well()


def test_an_item_that_vanishes_between_look_up_and_load(road: Road) -> None:
    scene = Scene(road)
    scene.store.stored = {A}
    ask = Ask("r1", over((A, 0, 8)), [(A, 0, 8)])
    scene.ask(ask)
    scene.step()
    scene.step(load_failed=[A])
    scene.run()
    assert scene.life("r1") == [WAITING, FOR_ITEM, FAILED]
    assert scene.last("r1").missing == [A]
    scene.make(A, 8)
    scene.run()
    scene.ask(ask._replace(name="r2"))
    scene.run()
    assert scene.life("r2") == [WAITING, RUNNING, FINISHED]
    assert scene.ordered == [A]
    assert scene.counter("vision_tower_images_total") == 1
    scene.assert_well("r1", ec_misses_total=2, ec_load_failures_total=1)


def test_a_prefix_hit_that_ends_inside_an_image(road: Road) -> None:
    """The rest of the image is taken from the buffer, into which it is loaded again."""
    scene = Scene(road, buffer_rows=12)
    scene.store.stored = {A, B}
    prompt = over((A, 2, 12))
    scene.ask(Ask("first", prompt[:14], [(A, 2, 12)], max_tokens=2))
    scene.run()
    scene.ask(Ask("other", [9, *over((B, 2, 12))[1:]], [(B, 2, 12)], max_tokens=2))  # takes the buffer
    scene.run()
    scene.ordered.clear()
    scene.ask(Ask("second", prompt, [(A, 2, 12)]))
    scene.run()
    assert scene.requests["second"].num_cached_tokens == 12
    assert scene.ordered == [A], "rows 10 and 11 are still needed"
    assert scene.life("second") == [WAITING, FOR_ITEM, RUNNING, FINISHED]
    scene.assert_well()


def test_the_same_text_over_another_image(road: Road) -> None:
    """Must not hit; the text before the image does, and the same image again."""
    scene = Scene(road)
    scene.store.stored = {A, B}
    cached = {}
    for name, key in (("a", A), ("b", B), ("a again", A)):
        scene.ask(Ask(name, over((key, 4, 8)), [(key, 4, 8)]))
        scene.run()
        cached[name] = scene.requests[name].num_cached_tokens
    assert cached == {"a": 0, "b": 4, "a again": 20 if road is Road.LOST_PULL else 16}, "all but the block of the last"
    assert sorted(scene.ordered) == [A, B]
    scene.assert_well()
