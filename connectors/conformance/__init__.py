"""The conformance kit: tries everything that a connector must stand, and says how each check ended.

    from connectors.conformance import ConnectorFactory, check

    report = check(ConnectorFactory.from_text("my_package.my_module:MyConnector", {"path": "items.db"}), MyHarness)
    assert report.exit_status == 0, report.table()

`python -m connectors.conformance` and `triptych connector check` do the same from the shell; docs/connectors.md walks
through it. A `Harness` lets the kit stop, fill, slow and spoil the store; without one these checks read "not tried".
"""

from __future__ import annotations

from connectors.conformance.factory import ConnectorFactory
from connectors.conformance.harness import Damage, Harness, NotTriedError, StoredItem
from connectors.conformance.report import Outcome, Report, Result
from connectors.conformance.runner import check

__all__ = [
    "ConnectorFactory",
    "Damage",
    "Harness",
    "NotTriedError",
    "Outcome",
    "Report",
    "Result",
    "StoredItem",
    "check",
]
