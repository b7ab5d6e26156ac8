"""The router's HTTP side: probes and metrics."""

from __future__ import annotations

import errno
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from core.errors import ConfigError
from core.server import address, check_bindable


class HttpServer:
    """`/health`: the process lives. `/ready`: it takes requests; the text also names the stages of which no worker
    serves. `/metrics`: Prometheus text. Event loop only."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        is_ready: Callable[[], bool],
        lacking: Callable[[], list[str]],
        reuse_port: bool = False,
    ) -> None:
        self._host = host
        self._port = port
        self._reuse_port = reuse_port
        self._registry = registry
        self._is_ready = is_ready
        self._lacking = lacking
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> str:
        """Listen; returns `host:port`. Raises ConfigError that names `--http-port` where it cannot."""
        if not self._reuse_port:
            check_bindable(self._host, self._port, port_option="--http-port")
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, reuse_port=self._reuse_port or None)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            reason = "in use" if error.errno == errno.EADDRINUSE else "cannot be listened on"
            raise ConfigError("--http-port", self._port, f"{reason} on {self._host}") from error
        return address(self._host, self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening, end what is being answered. Without effect before `start`."""
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        lacking = "".join(f"no worker serves {stage}\n" for stage in self._lacking())
        if self._is_ready():
            return web.Response(text=f"ready\n{lacking}")
        return web.Response(status=503, text=f"not ready\n{lacking}")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
