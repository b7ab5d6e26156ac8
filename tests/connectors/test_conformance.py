"""Every connector of ours, and the two of the documentation, pass the whole kit against real parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from connectors.conformance import ConnectorFactory, Harness, Outcome, check, harnesses
from connectors.conformance.checks import CHECKS
from connectors.conformance.processes import ForkServer
from examples.sqlite_harness import SqliteHarness
from tests.connectors.conformance_harnesses import FileHarness, TlsRedisHarness
from tests.e2e.mounts import can_mount

#: Not tried where no small file system can be mounted.
_FULL = frozenset({"faults/full"})
#: An item in another process's memory cannot be reached: its tests have a peer that lies, is silent and is full.
_NO_STORE = frozenset(name for name in CHECKS if name.startswith("damage/")) | {
    "look_ups/quick_while_the_store_hangs",
    "limits/time_to_live",
    "faults/gone_and_back",
    "faults/down_at_the_start",
    "faults/full",
    "faults/slow_loads",
    "faults/slow_saves",
    "ownership/late_load",
    "ownership/late_save",
    "hygiene/close_while_the_store_hangs",
    "hygiene/no_left_overs",
}
#: An arena has one version for all of its items, which its own tests change.
_ONE_VERSION = frozenset({"damage/older_version", "damage/newer_version"})
#: What the example is too small for.
_UNBOUNDED = frozenset({"limits/capacity", "limits/larger_than_the_store", "limits/time_to_live"})


class Case(NamedTuple):
    name: str
    harness: type[Harness] | None
    not_tried: frozenset[str] = frozenset()  # with a small file system
    module_path: str | None = None


CASES = {
    "shared storage": Case("ECSharedStorageConnector", harnesses.find("ECSharedStorageConnector")),
    "redis": Case("ECRedisConnector", harnesses.find("ECRedisConnector")),
    "redis with TLS and a password": Case("ECRedisConnector", TlsRedisHarness),
    "shared memory": Case("ECSharedMemoryConnector", harnesses.find("ECSharedMemoryConnector"), _ONE_VERSION),
    "peer": Case("ECPeerConnector", harnesses.find("ECPeerConnector"), _NO_STORE),
    "tiered": Case("ECTieredConnector", harnesses.find("ECTieredConnector")),
    "sqlite": Case("ECSqliteConnector", SqliteHarness, module_path="examples.sqlite_connector"),
    "ported from vLLM": Case(
        "ECFileConnector",
        FileHarness,
        (_NO_STORE | _UNBOUNDED) - {"faults/gone_and_back", "faults/down_at_the_start", "hygiene/no_left_overs"},
        module_path="examples.ported_connector",
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer("ECSharedStorageConnector") as server:
        yield server


#: These have a test of their own.
_LARGE = frozenset({"round_trip/64_MiB", "round_trip/256_MiB"})
#: Each takes some 14 s of a core; `make test` runs these, `make kit` all of them.
_ALWAYS = ("shared storage", "redis with TLS and a password", "sqlite")


@pytest.mark.parametrize(
    "name", [name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.whole_kit) for name in CASES]
)
@pytest.mark.timeout(400)
def test_the_whole_kit(name: str, server: ForkServer) -> None:
    case = CASES[name]
    report = check(ConnectorFactory(case.name, case.module_path), case.harness, server=server, max_item_mib=16)
    assert not report.of(Outcome.FAILED), report.table()
    assert not report.of(Outcome.REFUSED), report.table()
    may_be_left = case.not_tried | _LARGE if can_mount() else case.not_tried | _LARGE | _FULL
    assert {result.check for result in report.of(Outcome.NOT_TRIED)} <= may_be_left, report.table()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.whole_kit
@pytest.mark.timeout(600)
def test_the_largest_items(name: str, server: ForkServer) -> None:
    case = CASES[name]
    report = check(ConnectorFactory(case.name, case.module_path), case.harness, server=server, only=sorted(_LARGE))
    assert report.exit_status == 0, report.table()
