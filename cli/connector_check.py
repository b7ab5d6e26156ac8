"""`triptych connector check`: the conformance kit, run on one connector."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click

_END_S = 5.0


@click.group()
def connector() -> None:
    """Connectors: ours and yours."""


@connector.command()
@click.argument("which", metavar="MODULE:CLASS")
@click.option("--extra-config", metavar="JSON", help="The connector's settings, as an engine gets them.")
@click.option("--harness", metavar="MODULE:CLASS", help="A class that can stop, fill, slow and spoil the store.")
@click.option(
    "--only", multiple=True, metavar="CHECK", help="Only this check, or subject, such as damage/. Repeatable."
)
@click.option("--thorough", is_flag=True, help="Longer runs of what is random; takes minutes.")
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Within which the connector reports an order, where no timeout_s says it.  [default: 10]",
)
@click.option(
    "--max-item-mib",
    type=click.IntRange(0),
    metavar="MIB",
    help='Larger items are "not tried": the largest, 256 MiB, takes 2 GB of memory.  [default: 256]',
)
@click.option("--log", type=click.Path(dir_okay=False), help="A file that gets what the connector logs meanwhile.")
def check(
    which: str,
    extra_config: str | None,
    harness: str | None,
    only: tuple[str, ...],
    thorough: bool,
    time_limit: float | None,
    max_item_mib: int | None,
    log: str | None,
) -> int:
    """Try everything that a connector must stand, and print how each check ended.

    MODULE:CLASS is a class found as --ec-connector-module-path and --ec-connector find it, or the name of one of ours,
    which brings a store and a harness of its own unless --extra-config says which store is meant. A class whose name
    begins with KV is a KV connector.

    \b
    Exit status: 0  all was tried, and passed or was refused as documented
                 1  something failed
                 2  the command line is wrong
                 3  nothing failed, but not all was tried (for want of a harness, say)
    """
    argv = [sys.executable, "-m", "connectors.conformance", which]
    for option, value in (("--extra-config", extra_config), ("--harness", harness), ("--log", log)):
        if value is not None:
            argv += [option, value]
    for name in only:
        argv += ["--only", name]
    if time_limit is not None:
        argv += ["--time-limit", str(time_limit)]
    if max_item_mib is not None:
        argv += ["--max-item-mib", str(max_item_mib)]
    if thorough:
        argv.append("--thorough")
    # A process, because the kit needs torch, which the command line does not have.
    with subprocess.Popen(argv, env=dict(os.environ)) as process:  # noqa: S603 - a list of our own making, no shell
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal told it, too
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            raise
