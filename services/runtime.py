"""The life of a service's process, the same for all three: options, server, engine, ready, drain, exit code.

    start     options are checked, both ports are bound (so that one in use is found at once), health says NOT_SERVING
    engine    its process starts and loads; a failure here is one line and exit code 1 (2 where an option is at fault)
    ready     health says SERVING, one line on standard output names both ports
    SIGTERM   NOT_SERVING at once, calls in flight finish, leased KV blocks and the embeddings that this process alone
              holds are pulled or expire, exit code 0
    death     of the engine: NOT_SERVING, calls in flight end UNAVAILABLE, exit code 1

Which services a process offers follows from its roles. Stages may not import each other, so the servicers are found by
module path, as connectors are.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import click

from core import logs
from core.config import EngineConfig
from core.errors import EXIT_CONFIG, ConfigError, TriptychError
from core.metrics import StageMetrics
from core.options import ServeSettings, serve_options, settings_from_options
from core.server import GrpcServer, address
from core.types import Stage
from engine.protocol import EngineStats
from services.worker import Engine, Worker

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
_SHUTDOWN_S = 30.0
# What calls in flight have to end with their errors once the engine is dead.
_DEATH_GRACE_S = 5.0

StartEngine = Callable[[EngineConfig], Awaitable[Engine]]


def main(stage: Stage, start_engine: StartEngine | None = None) -> NoReturn:
    """The program `services/<stage>`: parse, serve, exit. What the operator got wrong is one line on standard error.

    `start_engine` is `AsyncLLM.start` unless given.
    """
    try:
        code = program(stage, start_engine).main(prog_name=f"services.{stage.value}", standalone_mode=False)
    except click.ClickException as error:
        code = EXIT_CONFIG
        logs.complain(error.format_message())
    except TriptychError as error:
        code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
        logs.complain(str(error))
    sys.exit(code)


def program(stage: Stage, start_engine: StartEngine | None = None) -> click.Group:
    """The command line of `stage`."""

    @click.group(no_args_is_help=False, help=f"The {stage.value} stage of Triptych.")
    def group() -> None:
        pass

    @group.command(help="Serve until SIGTERM.")
    @serve_options(stage)
    def serve(**options: Any) -> int:
        config, settings = settings_from_options(stage, options)
        logs.setup(settings.log_level, settings.where, settings.log_format)
        return asyncio.run(run(stage, config, settings, start_engine or _start_engine()))

    return group


def _start_engine() -> StartEngine:
    # Only now: --help and a wrong option answer without the engine's dependencies.
    from engine.async_llm import AsyncLLM

    return AsyncLLM.start


def services_of(stage: Stage, config: EngineConfig) -> list[Stage]:
    """The stages whose gRPC service a process offers: its own, and what `ec_both` and `kv_both` add."""
    offered = [stage]
    if config.ec_role.produces and stage is not Stage.ENCODER:
        offered.append(Stage.ENCODER)
    if config.kv_role is not None and config.kv_role.produces and stage is not Stage.PREFILL:
        offered.append(Stage.PREFILL)
    if config.kv_role is not None and config.kv_role.consumes and stage is not Stage.DECODE:
        offered.append(Stage.DECODE)
    return offered


async def run(stage: Stage, config: EngineConfig, settings: ServeSettings, start_engine: StartEngine) -> int:
    """Serve until a signal or the engine's death; returns the exit code.

    Raises ConfigError and whatever else `start_engine` raises, with everything stopped.
    """
    worker = Worker(stage, config, settings)
    server = GrpcServer(settings.host, settings.port)
    names = [
        importlib.import_module(f"services.{offered.value}.servicer").add_to_server(worker, server.server)
        for offered in services_of(stage, config)
    ]
    metrics = StageMetrics(stage)
    metrics_port = metrics.start_http(settings.host, settings.metrics_port)
    try:
        await server.start(names)
        signalled = asyncio.create_task(server.wait_for_signal())
        try:
            engine = await _engine_or_signal(start_engine(config), signalled)
            if engine is None:
                logger.info("stopped before the engine was ready")
                return 0
            life = _Life(worker, server, metrics, engine)
            server.set_serving(True)
            logs.say(
                f"ready {stage.value} grpc={server.bound} metrics={address(settings.host, metrics_port)}", sys.stdout
            )
            return await life.until_end(signalled)
        finally:
            signalled.cancel()
            await server.drain(0)
    finally:
        metrics.stop_http()


async def _engine_or_signal(starting: Awaitable[Engine], signalled: asyncio.Task[Any]) -> Engine | None:
    """The engine; None where a signal came first, and then the start was cancelled."""
    start = asyncio.ensure_future(starting)
    try:
        await asyncio.wait({start, signalled}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not start.done():
            start.cancel()
            await asyncio.wait({start}, timeout=_SHUTDOWN_S)
    if signalled.done() and (start.cancelled() or not start.done()):
        return None
    return await start


async def _shut_down(engine: Engine) -> None:
    try:
        await asyncio.wait_for(engine.shutdown(), _SHUTDOWN_S)
    except TimeoutError:
        logger.error("the engine did not stop within %g s", _SHUTDOWN_S)


class _Life:
    """From ready to the end."""

    def __init__(self, worker: Worker, server: GrpcServer, metrics: StageMetrics, engine: Engine) -> None:
        self._worker = worker
        self._server = server
        self._metrics = metrics
        self._engine = engine
        self._leases_changed = asyncio.Event()
        engine.on_stats = self._on_stats
        self._on_stats(engine.stats)
        worker.attach(engine)

    async def until_end(self, signalled: asyncio.Task[Any]) -> int:
        """Returns the exit code, with the engine shut down."""
        died = asyncio.create_task(self._engine.wait_failed())
        died.add_done_callback(self._on_death)
        try:
            await asyncio.wait({died, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not died.done():
                logger.info("draining, for at most %g s", self._worker.settings.drain_timeout_s)
                draining = asyncio.create_task(self._drain(self._worker.settings.drain_timeout_s))
                await asyncio.wait({died, draining}, return_when=asyncio.FIRST_COMPLETED)
                if not died.done():
                    await draining
                    logger.info("drained")
                    return 0
                draining.cancel()
            await self._server.drain(_DEATH_GRACE_S)
            return EXIT_FAILED
        finally:
            died.cancel()
            await _shut_down(self._engine)

    def _on_death(self, died: asyncio.Task[str]) -> None:
        if died.cancelled():
            return
        reason = str(died.exception() or died.result())
        logger.error("the engine died: %s", reason)
        self._worker.fail(f"its engine died: {reason}")
        self._server.set_serving(False)

    async def _drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        await self._server.drain(timeout_s)
        # Others may still be pulling what was handed over; they hold handles and item sources that name this process.
        while self._engine.stats.num_leases and (left_s := deadline - time.monotonic()) > 0:
            self._leases_changed.clear()
            try:
                await asyncio.wait_for(self._leases_changed.wait(), left_s)
            except TimeoutError:
                logger.warning("%d leases were neither pulled nor released", self._engine.stats.num_leases)

    def _on_stats(self, stats: EngineStats) -> None:
        self._leases_changed.set()
        try:
            self._metrics.update(stats)
        except KeyError as error:
            # A name that metrics.py lacks is our mistake, and no reason to stop serving.
            logger.error("%s", error.args[0])
