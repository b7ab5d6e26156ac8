"""Both KV connectors pass the kit's KV checks, and it catches those that are broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors.conformance import ConnectorFactory, Outcome, check, harnesses
from connectors.conformance.harnesses.peer import KVPeerHarness
from connectors.conformance.processes import ForkServer
from tests.connectors import kv_mutants
from tests.connectors.kv_mutants import KVMutant

MUTANTS = {
    name: cls
    for name, cls in vars(kv_mutants).items()
    if isinstance(cls, type) and issubclass(cls, KVMutant) and cls is not KVMutant
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer("tests.connectors.kv_mutants:KVMutant") as server:
        yield server


@pytest.mark.parametrize("name", ["KVPeerConnector", "KVSharedMemoryConnector"])
def test_the_whole_kit(name: str, server: ForkServer) -> None:
    report = check(ConnectorFactory(name), harnesses.find(name), server=server)
    assert report.results
    assert report.exit_status == 0, report.table()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_connector_is_caught(name: str, server: ForkServer) -> None:
    where, why = MUTANTS[name].caught_by
    report = check(ConnectorFactory(name, kv_mutants.__name__), KVPeerHarness, only=[where], server=server)
    result = report.result(where)
    assert result.outcome is Outcome.FAILED, "not caught"
    assert why in result.reason
