"""The router's life: listen, wait for the stages, serve, drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from core.server import GrpcServer
from protos import router_pb2_grpc
from router.fleet import Fleet
from router.http_app import HttpServer
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.servicer import SERVICE_NAME, RouterServicer
from router.settings import RouterSettings

logger = logging.getLogger(__name__)


async def serve(settings: RouterSettings) -> None:
    """Run until SIGTERM or SIGINT, and print `ready router grpc=… http=…` once every stage serves.

    Until then a log line says which workers cannot be reached or do not serve yet, health and `/ready` say not ready,
    and requests end UNAVAILABLE with the name of the stage that is awaited.

    Raises ConfigError where a port cannot be had, IncompatibleError where two stages do not fit together.
    """
    metrics = RouterMetrics()
    fleet = Fleet(settings)
    pipeline = Pipeline(fleet, metrics)
    servicer = RouterServicer(settings, pipeline, metrics)
    server = GrpcServer(settings.host, settings.port)
    router_pb2_grpc.add_RouterServicer_to_server(servicer, server.server)
    http = HttpServer(settings.host, settings.http_port, registry=metrics.registry, is_ready=lambda: servicer.ready)
    stop = asyncio.create_task(server.wait_for_signal())
    try:
        http_address = await http.start()
        await server.start([SERVICE_NAME])
        try:
            if await _first_of(stop, fleet.wait_until_serving()):
                servicer.ready = True
                server.set_serving(True)
                print(f"ready router grpc={server.bound} http={http_address}", flush=True)
                await _first_of(stop, fleet.monitor())
        finally:
            servicer.ready = False
            logger.info("draining")
            await server.drain(settings.drain_timeout_s)
    finally:
        stop.cancel()
        await pipeline.releases.close()
        await fleet.close()
        await http.stop()


async def _first_of(stop: asyncio.Task[object], work: Awaitable[None]) -> bool:
    """True where `work` ended by itself, with its exception raised; False where `stop` came first and cancelled it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({stop, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
