"""The router's life: listen, look at the workers, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec

from core import logs
from core.server import GrpcServer
from protos import router_pb2_grpc
from router.admin import start_admin
from router.discovery import Discovery
from router.fleet import Fleet
from router.http_app import HttpServer
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.roster import Roster
from router.servicer import SERVICE_NAME, RouterServicer
from router.settings import RouterSettings
from router.stages import Patience

logger = logging.getLogger(__name__)

#: A router that starts beside workers that serve knows them by then. One that took requests before would refuse what it
#: could answer a moment later, as a new one of several would while they are replaced one by one.
_FIRST_LOOK_S = 5.0


class Among(msgspec.Struct, frozen=True):
    """Which of several processes on the same ports this one is; its starter keeps the Admin service."""

    number: int
    #: Returns when the starter wants it to stop, or is gone.
    stopped: Callable[[Roster], Awaitable[object]]


async def serve(settings: RouterSettings, among: Among | None = None) -> int:
    """Run until SIGTERM or SIGINT, and print `ready router grpc=… http=… [admin=…]` once every stage serves. Returns 0.

    Health and `/ready` say ready once the workers have been looked at, which takes no longer than _FIRST_LOOK_S whether
    they are there or not. While a stage has none, a log line says which cannot be reached or do not serve yet, requests
    end UNAVAILABLE with its name, and health says NOT_SERVING of that name.

    Raises ConfigError where a port cannot be had or a policy be made, IncompatibleError where the listed stages do not
    fit together and no others can come.
    """
    shares_ports = among is not None
    metrics = RouterMetrics()
    async with AsyncExitStack() as at_end:
        fleet = Fleet(settings, metrics)
        at_end.push_async_callback(fleet.close)
        discovery = Discovery(settings, fleet, metrics)
        roster = Roster(fleet, discovery, among.number if among is not None else 0)
        pipeline = Pipeline(fleet, metrics, Patience(settings.stall_timeout_s, settings.client_timeout_s))
        servicer = RouterServicer(settings, pipeline, metrics)
        server = GrpcServer(settings.host, settings.port, reuse_port=shares_ports)
        router_pb2_grpc.add_RouterServicer_to_server(servicer, server.server)
        http = HttpServer(
            settings.host,
            settings.http_port,
            registry=metrics.exposed,
            is_ready=lambda: servicer.ready,
            lacking=lambda: [pool.stage.value for pool in fleet.missing()],
            reuse_port=shares_ports,
        )
        at_end.push_async_callback(http.stop)
        at_end.push_async_callback(pipeline.releases.close)
        stop: asyncio.Task[object] = asyncio.create_task(_stopped(server, among, roster))
        at_end.callback(stop.cancel)
        http_address = await http.start()
        await server.start([SERVICE_NAME], parts=[stage.value for stage in fleet.pools])
        fleet.on_change = lambda: server.set_parts(
            {stage.value: bool(pool.serving) for stage, pool in fleet.pools.items()}
        )
        ready = f"ready router grpc={server.bound} http={http_address}"
        if settings.admin_port is not None and among is None:
            admin = await start_admin(settings.admin_host, settings.admin_port, roster)
            at_end.push_async_callback(admin.drain, 0)
            ready += f" admin={admin.bound}"
        finding = asyncio.create_task(discovery.run())
        at_end.push_async_callback(_end, finding)
        try:
            await _first_of(stop, _take_requests(fleet, servicer, server, ready))
        finally:
            servicer.ready = False
            logger.info("draining")
            await server.drain(settings.drain_timeout_s)
    return 0


async def _take_requests(fleet: Fleet, servicer: RouterServicer, server: GrpcServer, ready: str) -> None:
    """Until cancelled. Raises what `Fleet.wait_until_serving` does."""
    every_stage = asyncio.ensure_future(fleet.wait_until_serving())
    try:
        await asyncio.wait({every_stage}, timeout=_FIRST_LOOK_S)
        if every_stage.done():
            every_stage.result()
        servicer.ready = True
        server.set_serving(True)
        await every_stage
    finally:
        every_stage.cancel()
    logs.say(ready, sys.stdout)
    await fleet.monitor()


async def _stopped(server: GrpcServer, among: Among | None, roster: Roster) -> None:
    """Return at a signal, or when the starter says so."""
    reasons = {asyncio.ensure_future(server.wait_for_signal())}
    if among is not None:
        reasons.add(asyncio.ensure_future(among.stopped(roster)))  # type: ignore[arg-type]
    try:
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for reason in reasons:
            reason.cancel()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


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
