"""Whose turn it is: priority, fair shares of tenants, arrival; and nobody starves."""

from __future__ import annotations

import random
import time

from core.types import SamplingParams
from engine.protocol import EngineCoreRequest
from engine.request import Request
from engine.request_queue import RequestQueue


def make(name: str, *, tenant: str = "", priority: int = 0, length: int = 10) -> Request:
    made = EngineCoreRequest(
        name,
        0.0,
        prompt_token_ids=[1] * length,
        sampling=SamplingParams(max_tokens=1),
        tenant=tenant,
        priority=priority,
    )
    return Request.from_core(made, 4096)


def drain(queue: RequestQueue, now_s: float = 0.0) -> list[str]:
    order = []
    while (request := queue.peek(now_s)) is not None:
        queue.remove(request)
        order.append(request.request_id)
    return order


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    queue = RequestQueue(10)
    for i in range(5):
        queue.push(make(f"r{i}", length=10 * (5 - i)), 0)
    assert len(queue) == 5
    assert drain(queue) == ["r0", "r1", "r2", "r3", "r4"]
    assert len(queue) == 0


def test_a_smaller_priority_goes_first() -> None:
    queue = RequestQueue(10)
    for i, priority in enumerate([1, 0, -1, 0]):
        queue.push(make(f"r{i}", priority=priority), 0)
    assert drain(queue) == ["r2", "r1", "r3", "r0"]


def test_a_tenant_with_a_thousand_requests_does_not_delay_anothers_first() -> None:
    queue = RequestQueue(10)
    for i in range(1000):
        queue.push(make(f"a{i}", tenant="a"), 0)
    for i in range(3):
        queue.push(make(f"b{i}", tenant="b"), 0)
    assert drain(queue)[:7] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]


def test_shares_are_counted_in_tokens() -> None:
    queue = RequestQueue(10)
    for i in range(40):
        queue.push(make(f"a{i}", tenant="a", length=99), 0)
        queue.push(make(f"b{i}", tenant="b", length=9), 0)
    first = drain(queue)[:22]
    assert sum(name.startswith("a") for name in first) in (2, 3)


def test_a_tenant_is_owed_nothing_for_the_time_in_which_it_was_silent() -> None:
    queue = RequestQueue(10)
    for i in range(100):
        queue.push(make(f"a{i}", tenant="a"), 0)
    served = 0
    while served < 50:
        request = queue.peek(0)
        assert request is not None
        queue.remove(request)
        served += 1
    for i in range(10):
        queue.push(make(f"b{i}", tenant="b"), 0)
    assert sum(name.startswith("b") for name in drain(queue)[:10]) == 5


def test_a_starving_request_ages_up() -> None:
    queue = RequestQueue(aging_s=10)
    queue.push(make("low", priority=2), now_s=0)
    now_s, order = 0.0, []
    for i in range(30):
        queue.push(make(f"high{i}", priority=0), now_s)
        queue.push(make(f"mid{i}", priority=1), now_s)
        request = queue.peek(now_s)
        assert request is not None
        queue.remove(request)
        order.append(request.request_id)
        now_s += 1
    assert "low" in order
    assert order.index("low") >= 20, "two levels, ten seconds each"


def test_a_preempted_request_keeps_its_place() -> None:
    queue = RequestQueue(10)
    first = make("first")
    for request in (first, make("second")):
        queue.push(request, 0)
    queue.remove(first)
    first.scheduled_s = 1.0
    queue.push(make("third"), 0)
    queue.push(first, 1)
    assert drain(queue) == ["first", "second", "third"]


def test_any_request_can_leave_and_what_is_left_keeps_its_order() -> None:
    draw = random.Random(1)
    queue = RequestQueue(10)
    there: list[Request] = []
    for i in range(2000):
        if there and draw.random() < 0.5:
            gone = draw.choice(there)
            queue.remove(gone)
            there.remove(gone)
        else:
            request = make(f"r{i}")
            queue.push(request, 0)
            there.append(request)
    assert len(queue) == len(there)
    assert list(queue) == there
    assert drain(queue) == [request.request_id for request in there]
    assert all(not level.by_age for level in queue._levels.values())


def test_a_turn_costs_the_same_however_many_wait() -> None:
    def seconds(num_waiting: int) -> float:
        queue = RequestQueue(1e9)
        for i in range(num_waiting):
            queue.push(make(f"r{i}", tenant=str(i % 50), priority=i % 3, length=1), 0)
        begin_s = time.thread_time()
        for _ in range(500):
            request = queue.peek(0)
            assert request is not None
            queue.remove(request)
            queue.push(request, 0)
        return time.thread_time() - begin_s

    assert min(seconds(20_000) for _ in range(3)) < 20 * min(seconds(200) for _ in range(3))


def test_tenants_that_come_and_go_are_forgotten() -> None:
    queue = RequestQueue(10)
    for i in range(5000):
        request = make(f"r{i}", tenant=f"t{i}")
        queue.push(request, 0)
        queue.remove(request)
    assert len(queue._tenant_tags) < 2000
