"""The console script `triptych`."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from cli.bench.command import bench
from cli.connector_check import connector
from cli.generate import generate
from cli.up import up
from core import logs
from core.errors import EXIT_CONFIG, ConfigError, TriptychError
from core.version import version

_EXIT_INTERRUPTED = 130  # the shell's word for Ctrl-C


@click.group()
@click.version_option(version(), prog_name="triptych")
def program() -> None:
    """Vision-language models served as three stages: a local cluster, a client, a benchmark."""


program.add_command(up)
program.add_command(generate)
program.add_command(bench)
program.add_command(connector)


def main() -> NoReturn:
    """Run and exit: 0, or 1 with one error on standard error, or 2 where the command line itself is wrong."""
    try:
        code = program.main(prog_name="triptych", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(EXIT_CONFIG)
    except click.ClickException as error:
        logs.complain(error.format_message())
        sys.exit(error.exit_code)
    except TriptychError as error:
        logs.complain(str(error))
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError) else 1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
