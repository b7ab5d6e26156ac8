"""The watch over all tests sees what it is there for."""

from __future__ import annotations

import pytest

from cli.cluster import LocalCluster
from tests.failure_watch import _STUBS, FailureWatch, injected_faults


class Worker:
    """Has counted something that only a fault explains."""

    counters = {"num_preemptions_total": 2, "prompt_tokens_total": 9}  # noqa: RUF012 - nobody writes to it


def end_of_test(watch: FailureWatch) -> None:
    hook = watch.pytest_runtest_teardown()
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(None)


def test_an_undeclared_failure_fails_the_test_and_no_later_one() -> None:
    watch, worker = FailureWatch(), Worker()
    watch._began(worker)
    watch._look_at(worker, "decode-0", worker.counters)
    with pytest.raises(pytest.fail.Exception, match=r"decode-0 counted \{'num_preemptions_total': 2\}"):
        end_of_test(watch)
    end_of_test(watch)


def test_a_declared_one_does_not() -> None:
    watch, worker = FailureWatch(), Worker()
    with injected_faults():
        watch._began(worker)
    watch._look_at(worker, "decode-0", worker.counters)
    end_of_test(watch)


def test_a_retry_of_any_stage_and_reason_is_a_failure() -> None:
    watch, router = FailureWatch(), Worker()
    name = 'router_retries_total{stage="encode",reason="missing"}'
    watch._look_at(router, "router", {name: 1, "router_requests_total": 5})
    with pytest.raises(pytest.fail.Exception, match="missing"):
        end_of_test(watch)


def test_every_program_of_a_cluster_can_be_asked() -> None:
    assert set(_STUBS) == {*LocalCluster.modules.values(), "router"}
