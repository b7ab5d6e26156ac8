"""What `make cluster-check` lets pass while pods are killed: named errors, and none that only sounds like one."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

import engine.stats
import router.metrics
from core.errors import OverloadedError, StageUnavailableError, TriptychError
from core.metrics import PREFIX
from core.types import Stage
from k8s.tools.check import FAILURES, is_named, is_router_gone
from router.metrics import RouterMetrics
from tests import failure_watch


def test_every_failure_is_a_counter_that_exists_and_tests_watch_it() -> None:
    names = dict.fromkeys(FAILURES, 1)
    assert failure_watch.failures(names) == names
    assert set(engine.stats.FAILURES) <= set(engine.stats.COUNTERS)
    page = generate_latest(RouterMetrics().registry).decode()
    assert [name for name in router.metrics.FAILURES if f"{PREFIX}{name}" not in page] == []


@pytest.mark.parametrize(
    ("code", "error"),
    [(stage, StageUnavailableError(stage, "none of its workers can be reached")) for stage in Stage],
    ids=str,
)
def test_a_stage_that_is_named_is(code: Stage, error: TriptychError) -> None:
    failure = f"UNAVAILABLE: {error}"
    assert is_named(failure)
    assert not is_router_gone(failure), code


def test_overload_is_named_and_other_ends_are_not() -> None:
    assert is_named(f"RESOURCE_EXHAUSTED: {OverloadedError('the queue is full')}")
    for strange in (
        "INTERNAL: internal error",
        "DEADLINE_EXCEEDED: Deadline Exceeded",
        "UNAVAILABLE: ",
        "UNAVAILABLE: the store is unavailable",
        "UNKNOWN: encoder is unavailable: ",
    ):
        assert not is_named(strange), strange
        assert not is_router_gone(strange), strange


@pytest.mark.parametrize(
    "details",
    [
        "Socket closed",
        "recvmsg:Connection reset by peer",
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.2:50060: connection refused",
    ],
)
def test_a_router_that_is_gone_is_told_from_a_stage(details: str) -> None:
    assert is_router_gone(f"UNAVAILABLE: {details}")
    assert not is_named(f"UNAVAILABLE: {details}")
