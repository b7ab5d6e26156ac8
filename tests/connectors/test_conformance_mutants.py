"""The kit catches connectors that are broken, each in the check that is there for it. (test_conformance.py has the one
that they derive from, which passes.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from connectors.conformance import ConnectorFactory, Outcome, check
from connectors.conformance.checks import CHECKS
from connectors.conformance.processes import ForkServer
from examples.sqlite_harness import SqliteHarness
from tests.connectors import mutants, mutants_of_conduct
from tests.connectors.mutants import Mutant

MUTANTS: dict[str, type[Mutant]] = {
    name: cls
    for module in (mutants, mutants_of_conduct)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and issubclass(cls, Mutant) and cls.__module__ == module.__name__ and cls is not Mutant
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer("tests.connectors.mutants:Mutant") as server:
        yield server


#: What they do can be measured on a quiet machine only.
_MEASURED = "interpreter_lock/"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.whole_kit) if mutant.caught_by[0].startswith(_MEASURED) else name
        for name, mutant in MUTANTS.items()
    ],
)
def test_a_broken_connector_is_caught(name: str, server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    where, why = MUTANTS[name].caught_by
    limit_s = 3.0 if why == "hung" else 30.0
    monkeypatch.setitem(CHECKS, where, CHECKS[where]._replace(limit_s=limit_s))
    factory = ConnectorFactory(name, MUTANTS[name].__module__, {"timeout_s": 1.0})
    report = check(factory, SqliteHarness, only=[where], server=server)
    result = report.result(where)
    assert result.outcome is Outcome.FAILED, "not caught"
    assert why in result.reason
    assert report.exit_status == 1
