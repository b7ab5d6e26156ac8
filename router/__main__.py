"""`python -m router serve --encoder HOST:PORT[,…] --prefill HOST:PORT[,…] --decode HOST:PORT[,…]`."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as `python router serve`: Python put the folder itself on the path, not the one around it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from core import logs
from core.errors import EXIT_CONFIG, TriptychError
from core.option_types import Parsed, choice, env_var, integer, number, text
from router.serve import serve
from router.settings import RouterSettings, parse_addresses

_F = TypeVar("_F", bound=Callable[..., Any])

_DAY_S = 86400.0


def _option(name: str, kind: Parsed, help_text: str, default: Any = None) -> Callable[[_F], _F]:
    # An explicit default of None would count as a value that was given.
    presence: dict[str, Any] = {"required": True} if default is None else {"default": default, "show_default": True}
    return click.option(name, type=kind, envvar=env_var(name), show_envvar=True, help=help_text, **presence)


@click.group()
def program() -> None:
    """The front door of Triptych."""


@program.command("serve")
@_option("--encoder", text(65536), "Encode workers, HOST:PORT[,HOST:PORT…].")
@_option("--prefill", text(65536), "Prefill workers, likewise.")
@_option("--decode", text(65536), "Decode workers, likewise.")
@_option("--host", text(255), "Address to listen on.", "127.0.0.1")
@_option("--port", integer(0, 65535), "gRPC port; 0: any free one.", 50060)
@_option("--http-port", integer(0, 65535), "Port of /health, /ready and /metrics; 0: any free one.", 8000)
@_option("--request-timeout", number(0, _DAY_S, above=True), "Seconds for a request without a deadline.", 300.0)
@_option("--max-inflight", integer(1), "Most requests in flight; more are refused.", 1024)
@_option("--max-image-bytes-held", integer(1), "Image bytes of all requests in flight together.", 4 * 1024**3)
@_option("--drain-timeout", number(0, _DAY_S), "Seconds that requests in flight have after SIGTERM.", 60.0)
@_option("--log-level", choice(*logs.LEVELS), "Lowest level that is logged.", "INFO")
def serve_command(
    *, encoder: str, prefill: str, decode: str, host: str, port: int, http_port: int, request_timeout: float,
    max_inflight: int, max_image_bytes_held: int, drain_timeout: float, log_level: str,
) -> None:  # fmt: skip
    """Wait for the workers, then serve until SIGTERM."""
    settings = RouterSettings(
        encoders=parse_addresses("--encoder", encoder),
        prefills=parse_addresses("--prefill", prefill),
        decodes=parse_addresses("--decode", decode),
        host=host,
        port=port,
        http_port=http_port,
        request_timeout_s=request_timeout,
        max_inflight=max_inflight,
        max_image_bytes_held=max_image_bytes_held,
        drain_timeout_s=drain_timeout,
    )
    logs.setup(log_level, "router")
    asyncio.run(serve(settings))


def main() -> NoReturn:
    """Parse, serve, exit. What the operator got wrong is one line on standard error and exit code 2."""
    try:
        program.main(prog_name="python -m router", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(EXIT_CONFIG)
    except click.ClickException as error:
        _complain(error.format_message())
    except TriptychError as error:  # ConfigError, or IncompatibleError between the stages
        _complain(str(error))
    sys.exit(0)


def _complain(message: str) -> NoReturn:
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
