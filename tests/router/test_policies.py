"""Whom each policy picks, and how a policy is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from core.errors import ConfigError
from core.types import Stage
from protos import common_pb2, prefill_pb2
from router.hash_ring import HashRing
from router.policies.base import Candidate, Policy
from router.policies.consistent_hash import ConsistentHash
from router.policies.expected_cost import ExpectedCost
from router.policies.free_kv import FreeKv
from router.policies.holders import Holders
from router.policies.registry import POLICIES, make_policy
from router.policies.simple import LeastLoaded, Random, RoundRobin
from router.predictor import Predictor
from router.work import Work

KEYS = [b"%d" % i for i in range(300)]


class Place:
    """A worker's load, written by the test."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.calls = self.kv_tokens = self.other_calls = self.waiting = self.other_kv_tokens = self.kv_capacity = 0
        self.cost = 0.0

    def __repr__(self) -> str:
        return self.address


class Last(Policy):
    """Found by its module path."""

    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        return candidates[-1]


class NeedsArguments(Policy):
    def __init__(self, what: str) -> None: ...

    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        return candidates[0]


def places(policy: Policy, num: int) -> list[Place]:
    made = [Place(f"w{i}:1") for i in range(num)]
    for place in made:
        policy.joined(place)
    return made


def give(policy: Policy, work: Work, candidates: Sequence[Place], *, keep: bool = False) -> Place:
    """Choose and assign; `keep`: the call stays under way."""
    chosen = policy.choose(work, candidates)
    place = next(place for place in candidates if place is chosen)
    charge = policy.charge(work, place)
    policy.assigned(work, place)
    if keep:
        place.calls += 1
        place.cost += charge
        place.kv_tokens += work.kv_tokens
    return place


def image(key: bytes, cost: int = 196) -> Work:
    return Work(stage=Stage.ENCODER, cost=cost, key=key)


# ---- the ring ----


def test_a_ring_walks_over_every_member_once_and_alike_for_all_who_built_it() -> None:
    one, other = HashRing(), HashRing()
    for name in "abc":
        one.add(name)
    for name in "cbda":
        other.add(name)
    other.remove("d")
    for key in KEYS:
        assert sorted(one.walk(key)) == ["a", "b", "c"]
        assert list(one.walk(key)) == list(other.walk(key))
    assert list(HashRing().walk(b"key")) == []


# ---- encode ----


def test_equal_images_meet() -> None:
    policy = ConsistentHash()
    workers = places(policy, 4)
    homes = {key: give(policy, image(key), workers) for key in KEYS}
    assert {give(policy, image(key), workers) is homes[key] for key in KEYS[:50]} == {True}
    assert set(homes.values()) == set(workers)


def test_images_of_one_request_spread_while_encoders_idle() -> None:
    policy = ConsistentHash()
    workers = places(policy, 4)
    assert len({give(policy, image(key), workers, keep=True) for key in KEYS[:4]}) == 4


def test_an_image_follows_its_copy_and_not_the_shortest_queue() -> None:
    policy = ConsistentHash()
    workers = places(policy, 4)
    home = give(policy, image(b"seen"), workers)
    home.calls, home.cost = 1, 196.0
    assert policy.choose(image(b"seen"), workers) is home
    home.cost = 5000.0  # but not at any price
    assert policy.choose(image(b"seen"), workers) is not home


def test_one_favourite_is_shared_once_it_is_more_than_a_worker_should_have() -> None:
    policy = ConsistentHash()
    workers = places(policy, 4)
    given = Counter(give(policy, image(b"favourite"), workers).address for _ in range(1000))
    assert len(given) == 4
    assert max(given.values()) <= 1.25 * 250 + 8


def test_a_newcomer_gets_its_share_and_not_everything() -> None:
    policy = ConsistentHash()
    workers = places(policy, 1)
    for key in KEYS:
        give(policy, image(key), workers)
    new = Place("new:1")
    policy.joined(new)
    workers.append(new)
    seen = [give(policy, image(key), workers) for key in KEYS]
    assert 0 < seen.count(new) < 0.5 * len(KEYS)  # they are cached at the other one, which keeps what it may have
    unseen = [give(policy, image(b"new" + key), workers) for key in KEYS]
    assert 0.25 < unseen.count(new) / len(KEYS) < 0.75


def test_a_worker_that_was_started_again_holds_nothing() -> None:
    policy = ConsistentHash()
    workers = places(policy, 3)
    for _ in range(40):  # more than its home should have: others hold it too
        give(policy, image(b"favourite"), workers)
    home = policy.choose(image(b"favourite"), workers)
    policy.joined(next(place for place in workers if place is home))
    assert policy.choose(image(b"favourite"), workers) is not home


# ---- prefill ----


def prompt(*parts: str | bytes, tenant: str = "") -> Work:
    """One message: texts, and images by their key."""
    request = prefill_pb2.PrefillRequest(tenant=tenant)
    message = request.chat.messages.add(role="user")
    for part in parts:
        if isinstance(part, str):
            message.content.add().text.text = part
        else:
            message.content.add().image.SetInParent()
            request.features.add(key=part.hex(), num_embeds=196)
    return Predictor().prefill_work(request)


LONG = "word " * 400


def test_a_conversation_goes_on_where_its_beginning_is() -> None:
    policy = ExpectedCost()
    workers = places(policy, 3)
    home = give(policy, prompt(b"picture", LONG), workers)
    others = [prompt(b"other", LONG), prompt(LONG, b"picture"), prompt(b"picture", LONG, tenant="b")]
    assert policy.charge(prompt(b"picture", LONG, "and then?"), home) < 20
    assert policy.choose(prompt(b"picture", LONG, "and then?"), workers) is home
    for other in others:
        assert policy.charge(other, home) == other.cost
        assert policy.choose(other, workers) is not home


def test_a_long_queue_costs_more_than_computing_anew() -> None:
    policy = ExpectedCost()
    workers = places(policy, 2)
    work = prompt(LONG)
    home = give(policy, work, workers)
    home.cost = work.cost / 2
    assert policy.choose(work, workers) is home
    home.cost = work.cost * 2.0
    assert policy.choose(work, workers) is not home
    home.cost, home.other_calls = 0.0, 10  # of another router
    assert policy.choose(work, workers) is not home


def test_a_worker_without_room_for_the_prompt_is_dearer() -> None:
    policy = ExpectedCost()
    workers = places(policy, 2)
    full, empty = workers
    full.kv_capacity = empty.kv_capacity = 4096
    full.other_kv_tokens = 4000
    assert {give(policy, prompt(f"{i} {LONG}"), workers) for i in range(4)} == {empty}


def test_equal_workers_take_turns() -> None:
    for policy in (ExpectedCost(), FreeKv(), LeastLoaded()):
        workers = places(policy, 3)
        work = Work(stage=Stage.PREFILL, cost=10)
        assert [give(policy, work, workers) for _ in range(6)] == workers * 2


def test_a_resumed_prompt_is_sought_by_the_one_it_began_as() -> None:
    original = prefill_pb2.PrefillRequest()
    original.chat.messages.add(role="user").content.add().text.text = LONG
    resumed = prefill_pb2.PrefillRequest()
    resumed.expanded.prompt_token_ids.extend(range(500))
    resumed.expanded.output_token_ids.extend(range(20))
    predictor, policy = Predictor(), ExpectedCost()
    workers = places(policy, 3)
    home = give(policy, predictor.prefill_work(original), workers)
    assert predictor.prefill_work(resumed, original).cost == 520
    assert policy.choose(predictor.prefill_work(resumed, original), workers) is home


def test_token_prompts_share_prefixes_too() -> None:
    def work(*token_ids: int) -> Work:
        request = prefill_pb2.PrefillRequest()
        request.tokens.token_ids.extend(token_ids)
        return Predictor().prefill_work(request)

    policy = ExpectedCost()
    workers = places(policy, 2)
    home = give(policy, work(*range(300)), workers)
    assert policy.charge(work(*range(256), 1, 2, 3), home) == 3
    assert policy.charge(work(1, *range(300)), home) == 301


def test_what_is_remembered_is_bounded_and_oldest_first_out() -> None:
    holders = Holders(3)
    for key in (b"a", b"b", b"c", b"a", b"d"):
        holders.note(key, "w")
    assert len(holders) == 3
    assert [holders.get(key) for key in (b"a", b"b", b"c", b"d")] == [("w",), (), ("w",), ("w",)]
    for i in range(20):
        holders.note(b"a", f"w{i}")
    assert len(holders.get(b"a")) == 8
    holders.forget_worker("w19")
    assert "w19" not in holders.get(b"a")
    prompt_of_megabytes = prompt("x" * 3_000_000)
    assert len(prompt_of_megabytes.prefix) <= 512
    assert prompt_of_megabytes.cost > 700_000


# ---- decode ----


def stream(prompt_tokens: int = 100, new_tokens: int = 100) -> Work:
    return Work(stage=Stage.DECODE, cost=new_tokens, kv_tokens=prompt_tokens + new_tokens)


def test_decode_goes_where_kv_is_free_and_nobody_waits() -> None:
    policy = FreeKv()
    big, small = places(policy, 2)
    big.kv_capacity, small.kv_capacity = 100_000, 10_000
    given = Counter(give(policy, stream(), [big, small], keep=True).address for _ in range(20))
    assert given[big.address] > given[small.address] > 0
    big.waiting = 10
    assert policy.choose(stream(), [big, small]) is small
    small.other_kv_tokens = 10_000
    assert policy.choose(stream(), [big, small]) is big


# ---- the simple ones ----


def test_round_robin_goes_on_where_it_was_when_workers_change() -> None:
    policy = RoundRobin()
    a, b, c = places(policy, 3)
    work = stream()
    assert [give(policy, work, [a, b, c]) for _ in range(4)] == [a, b, c, a]
    assert Counter(give(policy, work, [a, c]).address for _ in range(10)) == {"w0:1": 5, "w2:1": 5}


def test_random_leaves_nobody_out() -> None:
    policy = Random()
    workers = places(policy, 4)
    assert {give(policy, stream(), workers) for _ in range(200)} == set(workers)


# ---- by name ----


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_works_for_every_stage(name: str) -> None:
    policy = make_policy("--encode-policy", name)
    workers = places(policy, 2)
    for work in (image(b"key"), prompt(LONG), stream()):
        assert give(policy, work, workers) in workers
        assert give(policy, work, workers[:1]) is workers[0]
    policy.failed(image(b"key"), workers[0])
    policy.left(workers[0])
    assert give(policy, image(b"key"), workers[1:]) is workers[1]


def test_a_policy_of_somebody_elses_is_found_by_its_path() -> None:
    assert isinstance(make_policy("--decode-policy", f"{__name__}:Last"), Last)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("best", "none of consistent-hash, expected-cost"),
        ("no.such.module:Policy", "'no.such.module' cannot be imported"),
        ("router.work:Policy", "has no 'Policy'"),
        ("router.work:Work", "no subclass"),
        (f"{__name__}:NeedsArguments", "cannot be made"),
    ],
)
def test_what_is_no_policy_stops_the_start_by_name(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_policy("--decode-policy", name)
    assert str(error.value).startswith(f"--decode-policy={name!r}")
    assert reason in str(error.value)


# ---- prediction ----


def test_images_are_predicted_by_the_encoders_own_rule() -> None:
    predictor, picture = Predictor(), type("Picture", (), {"width": 448, "height": 448})()
    assert predictor.num_embeds(picture) == 196  # from the area
    predictor.learn(common_pb2.VisionRule(family="f", patch_size=14, merge_size=2, min_pixels=3136, max_pixels=1003520))
    assert predictor.num_embeds(picture) == 256
    predictor.learn(common_pb2.VisionRule(family="f", patch_size=0, merge_size=2))  # nonsense changes nothing
    assert predictor.num_embeds(picture) == 256
    predictor.learn(common_pb2.VisionRule(family="f", num_embeds=576))
    assert predictor.num_embeds(picture) == 576
