"""What the kit found: one result a check, the table, and the exit status."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from core.struct import Struct

#: Exit statuses of `python -m connectors.conformance` and of `triptych connector check`. 2 is a wrong command line.
EXIT_PASSED = 0
EXIT_FAILED = 1
EXIT_NOT_ALL_TRIED = 3

_COLOURS = {"passed": "32", "failed": "31;1", "not tried": "33", "refused": "36"}


class Outcome(enum.StrEnum):
    """How one check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_TRIED = "not tried"  # for want of a harness, or of a right that the machine does not give
    REFUSED = "refused"  # the connector said at its start, by ConfigError, that it does not do this


class Result(Struct, frozen=True):
    """One check's end. `reason` is one line: what went wrong, why it was not tried, or what was refused."""

    check: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0


class Report(Struct, frozen=True):
    """All results, in the order of the checks."""

    connector: str
    results: Sequence[Result]

    def of(self, outcome: Outcome) -> list[Result]:
        return [result for result in self.results if result.outcome is outcome]

    def result(self, check: str) -> Result:
        """The result of one check. Raises KeyError."""
        for result in self.results:
            if result.check == check:
                return result
        raise KeyError(check)

    @property
    def exit_status(self) -> int:
        """1 where a check failed; else 3 where one was not tried; else 0."""
        if self.of(Outcome.FAILED):
            return EXIT_FAILED
        return EXIT_NOT_ALL_TRIED if self.of(Outcome.NOT_TRIED) else EXIT_PASSED

    def table(self, *, colours: bool = False) -> str:
        """One line a check, and a last one with the totals."""
        return "\n".join([*(line_of(result, colours=colours) for result in self.results), "", self.summary()])

    def summary(self) -> str:
        counts = [f"{len(self.of(outcome))} {outcome}" for outcome in Outcome if self.of(outcome)]
        seconds = sum(result.seconds for result in self.results)
        return f"{self.connector}: {', '.join(counts)} ({seconds:.1f} s)"


def line_of(result: Result, *, colours: bool = False) -> str:
    """One line of the table."""
    outcome = f"{result.outcome:<9}"
    if colours:
        outcome = f"\033[{_COLOURS[result.outcome]}m{outcome}\033[0m"
    return f"{result.check:<38} {outcome} {result.seconds:5.1f} s  {result.reason}".rstrip()
