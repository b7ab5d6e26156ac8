"""Whatever a connector's store waits for, the engine goes on with everybody else's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from core.config import ConnectorConfig
from core.types import ECRole, SamplingParams
from tests.engine.blocking_connector import GATES, BlockingConnector, EmptyConnector
from tests.engine.engines import Engine, engine_config
from tests.pictures import picture

PICTURE = picture(1, 96, 64)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

MakeEngine = Callable[[ECRole, type[BlockingConnector]], Engine]


@pytest.fixture
def make_engine(tiny_model: Path, tmp_path: Path) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(role: ECRole, connector: type[BlockingConnector]) -> Engine:
        plugin = ConnectorConfig(connector.__name__, connector.__module__)
        made.append(Engine(msgspec.structs.replace(engine_config(tiny_model, tmp_path, role), ec_connector=plugin)))
        return made[-1]

    yield make
    for gate in GATES.values():
        gate.opened.set()
    for engine in made:
        engine.client.close()


@pytest.mark.parametrize("what", ["look-up", "load"])
def test_tokens_come_while_a_picture_is_waited_for(what: str, make_engine: MakeEngine) -> None:
    engine = make_engine(ECRole.CONSUMER, BlockingConnector)
    GATES[what].close()
    engine.add("picture", [5, PICTURE, 5], SHORT)
    engine.run_until(GATES[what].reached.is_set)
    engine.add("text", [10], LONG)
    engine.run("text")
    assert len(engine.tokens["text"]) == 40
    assert "picture" not in engine.ended
    GATES[what].opened.set()
    engine.run("picture")
    assert engine.ended["picture"].error_kind is None
    assert len(engine.tokens["picture"]) == 4
    engine.assert_empty()
    for counter in ("ec_load_failures_total", "ec_store_lookup_failures_total", "ec_misses_total"):
        assert engine.counter(counter) == 0


def test_tokens_come_while_an_item_is_saved(make_engine: MakeEngine) -> None:
    """And those of the picture itself too: its item is in the buffer."""
    engine = make_engine(ECRole.BOTH, EmptyConnector)
    GATES["save"].close()
    engine.encode("encode", PICTURE)
    engine.run_until(GATES["save"].reached.is_set)
    engine.add("text", [10], LONG)
    engine.add("picture", [5, PICTURE, 5], SHORT)
    engine.run("text", "picture")
    assert "encode" not in engine.ended
    assert engine.ended["picture"].error_kind is None
    GATES["save"].opened.set()
    engine.run("encode")
    assert engine.ended["encode"].error_kind is None
    engine.assert_empty()
    assert engine.counter("ec_save_failures_total") == 0
