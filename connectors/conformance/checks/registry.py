"""The list that checks enter themselves into."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from connectors.conformance.kit import Kit


class Check(NamedTuple):
    """`run` returns where the connector passes; else it raises what `ends` and `harness` define. `limit_s`: what takes
    longer is killed and has failed (five times as much in a thorough run)."""

    name: str
    run: Callable[[Kit], None]
    limit_s: float
    about: str


#: In the order of their definition, module by module.
ENTERED: list[Check] = []


def check(name: str, *, limit_s: float = 40.0) -> Callable[[Callable[[Kit], None]], Callable[[Kit], None]]:
    """Enter the function below. Its docstring, one sentence, says what a connector is to do."""

    def enter(run: Callable[[Kit], None]) -> Callable[[Kit], None]:
        about = " ".join((run.__doc__ or "").split())
        ENTERED.append(Check(name, run, limit_s, about))
        return run

    return enter
