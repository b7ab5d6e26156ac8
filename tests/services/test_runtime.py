"""What follows from roles, and what a drain waits for."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from core.config import ConnectorConfig, EngineConfig
from core.options import ServeSettings
from core.types import ECRole, KVRole, Stage
from engine.protocol import EngineStats
from services.runtime import run, services_of
from tests.services.fake_engine import FakeEngine

WAIT_S = 30.0
E, P, D = Stage.ENCODER, Stage.PREFILL, Stage.DECODE


def config(ec_role: ECRole, kv_role: KVRole | None) -> EngineConfig:
    return EngineConfig(model="/m", ec_role=ec_role, ec_connector=ConnectorConfig("X"), kv_role=kv_role)


@pytest.mark.parametrize(
    ("stage", "ec_role", "kv_role", "offered"),
    [
        (E, ECRole.PRODUCER, None, {E}),
        (E, ECRole.BOTH, None, {E}),
        (P, ECRole.CONSUMER, KVRole.PRODUCER, {P}),
        (P, ECRole.BOTH, KVRole.PRODUCER, {P, E}),
        (P, ECRole.CONSUMER, KVRole.BOTH, {P, D}),
        (D, ECRole.CONSUMER, KVRole.CONSUMER, {D}),
        (D, ECRole.CONSUMER, KVRole.BOTH, {D, P}),
        (D, ECRole.BOTH, KVRole.BOTH, {D, P, E}),
    ],
)
def test_roles_say_which_services_a_process_offers(
    stage: Stage, ec_role: ECRole, kv_role: KVRole | None, offered: set[Stage]
) -> None:
    found = services_of(stage, config(ec_role, kv_role))
    assert found[0] is stage
    assert set(found) == offered


class Running:
    """`run` on this loop, and the engine that it was given."""

    def __init__(self, drain_timeout_s: float) -> None:
        settings = ServeSettings("127.0.0.1", 0, 0, drain_timeout_s, "INFO", "prefill-0", "m")
        self.engine = FakeEngine()
        self.ready = asyncio.Event()
        self.code = asyncio.create_task(run(P, config(ECRole.CONSUMER, KVRole.PRODUCER), settings, self._start))

    async def _start(self, _: EngineConfig) -> FakeEngine:
        self.ready.set()
        return self.engine


@pytest.fixture
def when_logged() -> Iterator[Callable[[str], asyncio.Event]]:
    """An event that is set once a line that holds the text is logged."""
    watched: list[tuple[str, asyncio.Event]] = []

    def look(record: logging.LogRecord) -> bool:
        for text, seen in watched:
            if text in record.getMessage():
                seen.set()
        return True

    def watch(text: str) -> asyncio.Event:
        watched.append((text, asyncio.Event()))
        return watched[-1][1]

    logger = logging.getLogger("services.runtime")
    logger.setLevel(logging.INFO)
    logger.addFilter(look)
    yield watch
    logger.removeFilter(look)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("kind", ["kv_leases", "ec_leases"])
async def test_a_drain_waits_for_leases(when_logged: Callable[[str], asyncio.Event], kind: str) -> None:
    running = Running(drain_timeout_s=60)
    await asyncio.wait_for(running.ready.wait(), WAIT_S)
    running.engine.set_leases(2, kind)
    draining = when_logged("draining")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(draining.wait(), WAIT_S)
    running.engine.set_leases(1, kind)
    done, _ = await asyncio.wait({running.code}, timeout=0.2)
    assert not done
    assert not running.engine.stopped
    running.engine.set_leases(0, kind)
    assert await asyncio.wait_for(running.code, WAIT_S) == 0
    assert running.engine.stopped


async def test_leases_that_nobody_pulls_do_not_hold_a_drain_for_ever() -> None:
    running = Running(drain_timeout_s=0.1)
    await asyncio.wait_for(running.ready.wait(), WAIT_S)
    running.engine.set_leases(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running.code, WAIT_S) == 0


async def test_an_engine_that_dies_during_the_drain_is_a_failure(
    when_logged: Callable[[str], asyncio.Event],
) -> None:
    running = Running(drain_timeout_s=60)
    await asyncio.wait_for(running.ready.wait(), WAIT_S)
    running.engine.set_leases(1)
    draining = when_logged("draining")
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(draining.wait(), WAIT_S)
    running.engine.die("killed")
    assert await asyncio.wait_for(running.code, WAIT_S) == 1


async def test_a_metric_that_is_not_listed_is_logged_and_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    running = Running(drain_timeout_s=60)
    await asyncio.wait_for(running.ready.wait(), WAIT_S)
    running.engine.stats = EngineStats(counters={"naps_total": 1})
    running.engine.set_leases(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running.code, WAIT_S) == 0
    assert "naps_total" in caplog.text
