"""`check`: every check in a process of its own, the harness here, one report."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from connectors.conformance.channel import Channel, ChannelError, SilentError
from connectors.conformance.checks import CHECKS, Check
from connectors.conformance.factory import ConnectorFactory
from connectors.conformance.harness import CALLS, Damage, Harness, NotTriedError, OptionsHarness, StoredItem
from connectors.conformance.kit import MAX_ITEM_MIB, Settings
from connectors.conformance.processes import ForkServer, fork, kill
from connectors.conformance.report import Outcome, Report, Result

log = logging.getLogger(__name__)


def check(
    factory: ConnectorFactory,
    harness: type[Harness] | None = None,
    *,
    only: Iterable[str] | None = None,
    thorough: bool = False,
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_item_mib: int = MAX_ITEM_MIB,
    log_path: Path | None = None,
    server: ForkServer | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Try everything that a connector must stand, and say how each check ended.

    `only`: names of checks, all that fit the connector if None. `thorough`: longer runs of what is random.
    `time_limit_s`: within which the connector reports an order, where its extra config has no `timeout_s`.
    `max_item_mib`: checks of larger items read "not tried"; the largest takes 2 GB of memory. `log_path`: gets what the
    checks' processes write to standard error. `server`: one that runs, for callers that check many connectors. Blocks
    until all are through; each check has a deadline.

    Raises KeyError for an unknown name in `only`, ChannelError where processes cannot be started at all.
    """
    ours = [name for name in CHECKS if name.startswith("kv/") == factory.is_kv]
    checks = [CHECKS[name] for name in (ours if only is None else only)]
    settings = Settings(thorough, time_limit_s, seed, max_item_mib)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="triptych-kit-store-") as folder:
        made = harness(Path(folder), factory.extra) if harness else OptionsHarness(factory.options(), factory.extra)
        try:
            refusal = _open(made)
            with contextlib.ExitStack() as own:
                if server is None:
                    connector = f"{factory.module_path}:{factory.name}" if factory.module_path else factory.name
                    server = own.enter_context(ForkServer(connector, log_path=log_path))
                for each in checks:
                    begin_s = time.monotonic()
                    outcome, reason = refusal or _run(each, factory, settings, made, server.path)
                    results.append(Result(each.name, outcome, reason, time.monotonic() - begin_s))
                    on_result(results[-1])
                    made.restore()
        finally:
            made.close()
    return Report(factory.name, results)


def _open(harness: Harness) -> tuple[Outcome, str] | None:
    try:
        harness.open()
    except NotTriedError as error:
        return Outcome.NOT_TRIED, str(error)
    return None


def _run(
    each: Check, factory: ConnectorFactory, settings: Settings, harness: Harness, path: str
) -> tuple[Outcome, str]:
    pid, channel = fork(path, "check", check=each.name, factory=factory, settings=settings)
    limit_s = each.limit_s * (5 if settings.thorough else 1)
    deadline_s = time.monotonic() + limit_s
    try:
        while True:
            message = channel.receive(max(0.0, deadline_s - time.monotonic()))
            if "harness" in message:
                _answer(channel, harness, message["harness"], message["args"])
            elif "exit" in message:
                return Outcome.FAILED, f"the process ended {_how(message['exit'])}"
            else:
                return Outcome(message["outcome"]), message["reason"]
    except SilentError:
        return Outcome.FAILED, f"hung: no end after {limit_s:g} s"
    except ChannelError as error:
        return Outcome.FAILED, f"the process ended: {error}"
    finally:
        kill(pid, channel)


def _answer(channel: Channel, harness: Harness, call: str, args: list[Any]) -> None:
    if call not in CALLS:
        raise ValueError(f"a check asked the harness for {call!r}")
    try:
        if call == "slow":
            args = [msgspec.convert(args[0], list[StoredItem])]
        elif call == "damage":
            item, how, other = args
            args = [msgspec.convert(item, StoredItem), Damage(how), msgspec.convert(other, StoredItem | None)]
        value = getattr(harness, call)(*args)
    except NotTriedError as error:
        channel.send(not_tried=str(error))
    except Exception as error:
        log.exception("the harness failed")
        channel.send(not_tried=f"the harness failed: `{call}` raised {type(error).__name__}: {error}")
    else:
        channel.send(value=dict(value) if isinstance(value, Mapping) else value)


def _how(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"
