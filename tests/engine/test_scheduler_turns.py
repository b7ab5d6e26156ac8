"""Who gives way to whom: priorities under memory pressure, long prompts beside decodes, prompts computed in part."""

from __future__ import annotations

import pytest

from core.types import FinishReason
from engine.request import RequestStatus
from tests.engine.harness import Bench


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_the_lowest_priority_is_preempted_first(order: str) -> None:
    bench = Bench(num_blocks=8)
    priorities = {"a": 0, "b": 1, "c": -1}
    for name in order:
        bench.add(name, 8, max_tokens=12, priority=priorities[name])
    requests = dict(bench.scheduler._requests)
    bench.step()
    assert all(request.status is RequestStatus.RUNNING for request in requests.values())
    ends = []
    while bench.scheduler.has_work:
        bench.step()
        ends += [name for name, request in requests.items() if request.status.finished and name not in ends]
    assert ends == ["c", "a", "b"]
    assert requests["c"].preemptions == 0
    assert requests["b"].preemptions >= 1
    assert requests["b"].preemptions >= requests["a"].preemptions
    assert all(bench.last(name).finish_reason is FinishReason.LENGTH for name in order)
    bench.assert_empty()


def test_long_prompts_take_a_share_of_the_steps_in_which_others_decode() -> None:
    """At most so many tokens of each, and at most so many of them begun, so that a decode never waits for a prompt."""
    bench = Bench(budget=64, long_prompt=3)
    bench.add("decode", 4, max_tokens=40)
    bench.step()
    prompts = ["p0", "p1", "p2", "p3"]
    for name in prompts:
        bench.add(name, 20, max_tokens=1)
    begun: list[str] = []
    while not all(name in bench.outputs for name in prompts):
        scheduled = dict(bench.step().num_scheduled_tokens)
        assert scheduled.pop("decode") == 1
        assert max(scheduled.values()) <= 3
        begun += [name for name in scheduled if name not in begun]
        unfinished = [name for name in begun if name not in bench.outputs]
        assert len(unfinished) <= bench.scheduler.settings.max_num_partial_prefills
    assert begun == prompts
    bench.settle()
    bench.assert_empty()


def test_a_prompt_alone_has_the_whole_step() -> None:
    bench = Bench(budget=64, long_prompt=3)
    bench.add("r", 40, max_tokens=1)
    assert bench.step().num_scheduled_tokens == {"r": 40}
