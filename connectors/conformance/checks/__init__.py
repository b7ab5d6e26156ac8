"""Everything that the kit tries, by name, in order. One module a subject."""

from __future__ import annotations

from connectors.conformance.checks import (  # noqa: F401 - importing them enters them
    concurrency,
    damage,
    faults,
    hygiene,
    interpreter_lock,
    keys,
    kv,
    limits,
    look_ups,
    ownership,
    round_trip,
)
from connectors.conformance.checks.registry import ENTERED, Check

__all__ = ["CHECKS", "Check"]

_SUBJECTS = (
    "round_trip",
    "look_ups",
    "keys",
    "damage",
    "limits",
    "faults",
    "concurrency",
    "ownership",
    "interpreter_lock",
    "hygiene",
    "kv",
)

#: By name, in the order in which they run and stand in the report.
CHECKS: dict[str, Check] = {
    check.name: check for check in sorted(ENTERED, key=lambda check: _SUBJECTS.index(check.name.partition("/")[0]))
}
