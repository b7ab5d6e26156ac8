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
from router.policies.registry import POLICIES
from router.processes import run_process, supervise
from router.serve import serve
from router.settings import RouterSettings, parse_workers

_F = TypeVar("_F", bound=Callable[..., Any])

_DAY_S = 86400.0
_POLICY_NAMES = f"{', '.join(POLICIES)}, or MODULE:CLASS"


def _option(name: str, kind: Parsed, help_text: str, default: Any = None) -> Callable[[_F], _F]:
    # An explicit default of None would count as a value that was given.
    presence: dict[str, Any] = {"required": True} if default is None else {"default": default, "show_default": True}
    return click.option(name, type=kind, envvar=env_var(name), show_envvar=True, help=help_text, **presence)


def _optional(name: str, kind: Parsed, help_text: str) -> Callable[[_F], _F]:
    return click.option(name, type=kind, envvar=env_var(name), show_envvar=True, help=help_text)


def _flag(name: str, help_text: str) -> Callable[[_F], _F]:
    return click.option(
        f"{name}/--no-{name.removeprefix('--')}",
        default=False,
        envvar=env_var(name),
        show_envvar=True,
        show_default=True,
        help=help_text,
    )


@click.group()
def program() -> None:
    """The front door of Triptych."""


@program.command("serve")
@_option("--encoder", text(65536), "Encode workers: HOST:PORT or dns:NAME:PORT, comma between; none: --admin-port's.")
@_option("--prefill", text(65536), "Prefill workers, likewise.")
@_option("--decode", text(65536), "Decode workers, likewise.")
@_option("--encode-policy", text(1024), f"Who encodes an image: {_POLICY_NAMES}.", "consistent-hash")
@_option("--prefill-policy", text(1024), "Who computes a prompt, likewise.", "expected-cost")
@_option("--decode-policy", text(1024), "Who decodes, likewise.", "free-kv")
@_option("--host", text(255), "Address to listen on.", "127.0.0.1")
@_option("--port", integer(0, 65535), "gRPC port; 0: any free one.", 50060)
@_option("--http-port", integer(0, 65535), "Port of /health, /ready and /metrics; 0: any free one.", 8000)
@_optional("--admin-port", integer(0, 65535), "gRPC port of the Admin service; 0: any free one [default: no service].")
@_option("--admin-host", text(255), "Address that the Admin service listens on.", "127.0.0.1")
@_option("--processes", integer(1, 256), "Router processes that share the ports; limits are those of each.", 1)
@_option("--request-timeout", number(0, _DAY_S, above=True), "Seconds for a request without a deadline.", 300.0)
@_option("--max-inflight", integer(1), "Most requests in flight; more are refused.", 1024)
@_option("--max-image-bytes-held", integer(1), "Image bytes of all requests in flight together.", 4 * 1024**3)
@_option("--max-work", integer(0), "Predicted tokens under way at once; 0: twice what decode's KV caches hold.", 0)
@_option("--max-queue", integer(0), "Most requests that wait until there is less under way.", 1024)
@_option("--max-queue-time", number(0, _DAY_S), "Seconds that one may be predicted to wait for that.", 30.0)
@_flag("--trust-tenant-header", "Take the tenant from the metadata x-tenant-id.")
@_option("--drain-timeout", number(0, _DAY_S), "Seconds that requests in flight have after SIGTERM.", 60.0)
@_option(
    "--stall-timeout", number(0, _DAY_S, above=True), "Seconds without a word until another worker is asked.", 30.0
)
@_option(
    "--client-timeout", number(0, _DAY_S, above=True), "Seconds until a client that reads nothing is given up.", 30.0
)
@_option(
    "--worker-timeout", number(0, _DAY_S, above=True), "Seconds until a worker that answers nothing is lost.", 10.0
)
@_option("--dns-interval", number(0, _DAY_S, above=True), "Seconds until a name is resolved again.", 5.0)
@_option("--log-level", choice(*logs.LEVELS), "Lowest level that is logged.", "INFO")
@_option("--log-format", choice(*logs.FORMATS), "Log lines for people, or one JSON object each.", "text")
def serve_command(
    *, encoder: str, prefill: str, decode: str, encode_policy: str, prefill_policy: str, decode_policy: str, host: str,
    port: int, http_port: int, admin_port: int | None, admin_host: str, processes: int, request_timeout: float,
    max_inflight: int, max_image_bytes_held: int, max_work: int, max_queue: int, max_queue_time: float,
    trust_tenant_header: bool, drain_timeout: float, stall_timeout: float, client_timeout: float, worker_timeout: float,
    dns_interval: float, log_level: str, log_format: str,
) -> None:  # fmt: skip
    """Wait for the workers, then serve until SIGTERM."""
    admin = admin_port is not None
    settings = RouterSettings(
        encoders=parse_workers("--encoder", encoder, admin=admin),
        prefills=parse_workers("--prefill", prefill, admin=admin),
        decodes=parse_workers("--decode", decode, admin=admin),
        encode_policy=encode_policy,
        prefill_policy=prefill_policy,
        decode_policy=decode_policy,
        host=host,
        port=port,
        http_port=http_port,
        admin_host=admin_host,
        admin_port=admin_port,
        processes=processes,
        request_timeout_s=request_timeout,
        max_inflight=max_inflight,
        max_image_bytes_held=max_image_bytes_held,
        max_work=max_work,
        max_queue=max_queue,
        max_queue_s=max_queue_time,
        trust_tenant_header=trust_tenant_header,
        drain_timeout_s=drain_timeout,
        stall_timeout_s=stall_timeout,
        client_timeout_s=client_timeout,
        worker_timeout_s=worker_timeout,
        dns_interval_s=dns_interval,
        log_level=log_level,
        log_format=log_format,
    )
    logs.setup(log_level, "router", log_format)
    sys.exit(asyncio.run(supervise(settings) if processes > 1 else serve(settings)))


@program.command("process", hidden=True)
def process_command() -> None:
    """One of several processes of a router; `serve --processes N` starts it and talks to it (router/processes.py)."""
    asyncio.run(run_process())


def main() -> NoReturn:
    """Parse, serve, exit. What the operator got wrong is one line on standard error and exit code 2."""
    try:
        program.main(prog_name="python -m router", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(EXIT_CONFIG)
    except click.ClickException as error:
        logs.complain(error.format_message())
        sys.exit(EXIT_CONFIG)
    except TriptychError as error:  # ConfigError, or IncompatibleError between the stages
        logs.complain(str(error))
        sys.exit(EXIT_CONFIG)
    sys.exit(0)


if __name__ == "__main__":
    main()
