"""Life cycle of a `grpc.aio` server: bind, health, reflection, drain; and the border where errors become statuses.

    server = GrpcServer(host, port)
    encoder_pb2_grpc.add_EncoderServicer_to_server(servicer, server.server)
    port = await server.start(["triptych.v1.Encoder"])   # answers, health says NOT_SERVING
    server.set_serving(True)
    await server.wait_for_signal()
    await server.drain(grace_s)

Everything here runs on the event loop on which the server was made.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core.errors import ConfigError, EngineError, TriptychError, to_status
from core.health import Health
from core.malformed import RefuseMalformed
from core.retry_after import retry_metadata

logger = logging.getLogger(__name__)

#: Largest message either way: a prompt with its images, each at most 32 MiB.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

#: From the word that we serve no more until new calls are refused: for the word to arrive, and for what crossed it.
_NOTICE_S = 0.25

# Status details travel in a trailer, and clients refuse more than 8 KiB of those.
_MAX_DETAILS = 2000


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> tuple[tuple[str, int], ...]:
    """Options for both ends of a channel, so that neither end's pings or sizes are refused by the other."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A peer that vanished without a word (a lost node) is noticed within half a minute.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A worker that is back is seen within some two seconds, not after gRPC's two minutes. The second of these is
        # how long an attempt to connect may take where nobody answers; gRPC's is 20 s.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Stages talk to each other directly, whatever http_proxy says.
        ("grpc.enable_http_proxy", 0),
    )


#: What clients of a `GrpcServer` with the default message size pass as `options`.
CHANNEL_OPTIONS = channel_options()


def address(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_bindable(host: str, port: int, *, port_option: str = "--port") -> None:
    """Raise ConfigError, naming the option at fault, where `host:port` cannot be listened on.

    gRPC's own failure names no reason and prints lines of its own, so the same bind is tried with a plain socket first.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(port_option, port, "not a port number, 0 to 65535")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError("--host", host, "not an address of this machine") from error
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: TIME_WAIT is no reason to refuse
        try:
            probe.bind(where)
            # On Linux two sockets with SO_REUSEADDR may bind the same port until one of them listens.
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(port_option, port, f"in use on {host}") from error
            if error.errno == errno.EACCES:
                raise ConfigError(port_option, port, "this user may not bind it") from error
            raise ConfigError("--host", host, "not an address of this machine") from error


class GrpcServer:
    """A `grpc.aio` server with health and reflection. One per process, on the running event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        reuse_port: bool = False,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.host = host
        self.port = port  # the real one after `start`
        options = (
            *channel_options(max_message_bytes),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            # Two servers on one port share the connections between them; where nobody wants that, the second one is
            # to fail instead.
            ("grpc.so_reuseport", int(reuse_port)),
        )
        #: Add servicers to this before `start`.
        self.server: grpc.aio.Server = grpc.aio.server(options=options, interceptors=(RefuseMalformed(), *interceptors))
        self._reuse_port = reuse_port
        self._health: Health | None = None

    async def start(self, service_names: Sequence[str], *, parts: Sequence[str] = ()) -> int:
        """Bind and answer; health says NOT_SERVING. Returns the port. Raises ConfigError where it cannot bind.

        `service_names` are full names such as "triptych.v1.Encoder"; `parts` are names that health alone knows, for
        `set_parts`.
        """
        if not self._reuse_port:
            check_bindable(self.host, self.port)
        try:
            self.port = self.server.add_insecure_port(address(self.host, self.port))
        except RuntimeError as error:
            raise ConfigError("--port", self.port, f"in use on {self.host}") from error
        self._health = Health(service_names, parts)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME],
            self.server,
        )
        await self.server.start()
        return self.port

    @property
    def bound(self) -> str:
        """`host:port` as a client on this machine would dial it."""
        return address(self.host, self.port)

    def set_serving(self, serving: bool) -> None:
        """What health says from now on, overall and for every service. Only after `start`."""
        self._started_health().set_serving(serving)

    def set_parts(self, serving: Mapping[str, bool]) -> None:
        """What health says from now on of the parts named. Only after `start`."""
        self._started_health().set_parts(serving)

    def _started_health(self) -> Health:
        if self._health is None:
            raise RuntimeError("the server has not been started")
        return self._health

    async def drain(self, grace_s: float) -> None:
        """Not ready at once; refuse new calls, a moment later if somebody watches our health; let those in flight
        finish, `grace_s` seconds at most; then cancel them.

        A second call with a shorter grace shortens the first. Returns once every handler has ended.
        """
        if self._health is not None:
            is_watched = self._health.is_watched
            self._health.set_serving(False)
            if is_watched and grace_s > 0:
                # Whoever watches sends nothing more once it has heard: what is on its way meanwhile is served.
                await asyncio.sleep(min(_NOTICE_S, grace_s))
            self._health.close()
        await self.server.stop(grace_s)

    async def wait_for_signal(self) -> signal.Signals:
        """See the function of that name."""
        return await wait_for_signal()


async def wait_for_signal() -> signal.Signals:
    """Return at the first SIGTERM or SIGINT. Later ones are ignored: a drain that has begun is not to be cut short by a
    supervisor that signals both the process and its group."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(which: signal.Signals) -> None:
        if not received.done():
            received.set_result(which)

    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, on_signal, which)
    return await received


class _Guard:
    """See `guarded`."""

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        what: str,
        explain: Callable[[Exception], Awaitable[Exception]] | None,
    ) -> None:
        self._context = context
        self._what = what
        self._explain = explain

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # CancelledError and GeneratorExit are no Exceptions: grpc needs to see them as they are.
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return
        if self._explain is not None:
            error = await self._explain(error)
        if isinstance(error, EngineError) or not isinstance(error, TriptychError):
            logger.error("%s failed", self._what, exc_info=error)
        code, details = to_status(error)
        details = details[:_MAX_DETAILS]
        await self._context.abort(code, details, retry_metadata(error, code, details))


def guarded(
    context: grpc.aio.ServicerContext[Any, Any],
    what: str,
    explain: Callable[[Exception], Awaitable[Exception]] | None = None,
) -> _Guard:
    """`async with guarded(context, "Encoder.Encode <id>"):` around a handler's whole body, unary or streaming.

    Any exception ends the call with the status of `core.errors.to_status`. Unexpected ones are logged with their
    traceback and reach the client as INTERNAL with a fixed text. Cancellation passes through.
    `explain` may name a better error for the one that was raised.
    """
    return _Guard(context, what, explain)
