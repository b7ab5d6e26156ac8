"""Runs the kit on one connector and prints a table. `triptych connector check` is this in a process of its own."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from connectors.conformance import harnesses
from connectors.conformance.checks import CHECKS
from connectors.conformance.factory import ConnectorFactory
from connectors.conformance.harness import Harness
from connectors.conformance.kit import MAX_ITEM_MIB
from connectors.conformance.report import Result, line_of
from connectors.conformance.runner import check
from core.errors import EXIT_CONFIG, ConfigError

EXIT_TERMINATED = 143  # the shell's word for SIGTERM


def main() -> int:
    """The exit status: 0 all passed (or refused, as documented), 1 something failed, 3 not everything was tried, 2 the
    command line is wrong."""
    parser = argparse.ArgumentParser(prog="python -m connectors.conformance", description=__doc__)
    parser.add_argument("connector", metavar="MODULE:CLASS", nargs="?", help="or the name of one of ours")
    parser.add_argument("--extra-config", type=_json_object, default={}, metavar="JSON", help="as an engine gets it")
    parser.add_argument("--harness", metavar="MODULE:CLASS", help="how to stop, fill, slow and spoil the store")
    parser.add_argument("--only", action="append", metavar="CHECK", help="this check; a subject such as damage/; again")
    parser.add_argument("--thorough", action="store_true", help="longer runs of what is random; some minutes")
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="SECONDS", help="where no timeout_s says it")
    parser.add_argument(
        "--max-item-mib", type=int, default=MAX_ITEM_MIB, metavar="MIB", help="try no larger item; %(default)s is all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, metavar="FILE", help="gets what the checks' processes log")
    parser.add_argument("--list", action="store_true", help="print the checks and what each asks for, and end")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # so that mounts and servers go
    sys.path.insert(0, os.getcwd())  # a stranger's module lies where the stranger is
    if options.list:
        for each in CHECKS.values():
            print(f"{each.name:<38} {each.about}")
        return 0
    if options.connector is None:
        parser.error("which connector? MODULE:CLASS")
    try:
        factory = ConnectorFactory.from_text(options.connector, options.extra_config)
        factory.find_class()
        harness = _find_harness(options.harness, factory)
        only = _select(options.only)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    colours = sys.stdout.isatty()

    def show(result: Result) -> None:
        print(line_of(result, colours=colours), flush=True)

    report = check(
        factory,
        harness,
        only=only,
        thorough=options.thorough,
        time_limit_s=options.time_limit,
        seed=options.seed,
        max_item_mib=options.max_item_mib,
        log_path=options.log,
        on_result=show,
    )
    print(f"\n{report.summary()}")
    return report.exit_status


def _json_object(text: str) -> Mapping[str, Any]:
    value = json.loads(text)  # argparse makes an error of ValueError
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _find_harness(text: str | None, factory: ConnectorFactory) -> type[Harness] | None:
    """The one that is named; for one of ours its own, unless extra config says which store is meant."""
    if text is None:
        return None if factory.extra or factory.module_path else harnesses.find(factory.name)
    module, _, name = text.rpartition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:
        raise ConfigError("--harness", text, f"cannot be imported: {error}") from None
    if not isinstance(found, type) or not issubclass(found, Harness):
        raise ConfigError("--harness", text, "is not a subclass of connectors.conformance.Harness")
    return found


def _select(only: list[str] | None) -> list[str] | None:
    if only is None:
        return None
    selected = [name for name in CHECKS if any(name == each or name.startswith(each) for each in only)]
    if not selected:
        raise ConfigError("--only", " ".join(only), "no check has such a name; --list prints them")
    return selected


if __name__ == "__main__":
    sys.exit(main())
