"""Two tasks a worker that ask how it is: its health, watched, and its load, polled.

The watch says at once that a worker drains or that its connection broke. It says nothing of a process that was stopped
or whose network vanished: its silence is what the polls are for. One poll without an answer makes others preferred; a
worker that has answered none for `worker_timeout_s` is lost, and so are the calls that wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2

from protos import common_pb2
from router.workers import Worker

logger = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_CALL_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 1.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
#: A worker that answers health and has no such service is asked again after that: something else may take its place.
_UNFIT_BACKOFF_S = 5.0
#: One miss may be our own stall.
_MISSES_OF_A_LOST_WORKER = 2


class Listener(Protocol):
    """Who is told. `Fleet` is one. Called on the event loop; none may wait."""

    def met(self, worker: Worker, info: common_pb2.ServerInfo) -> None:
        """It says SERVING, and this is what it is. Each time that it begins to serve."""

    def changed(self, worker: Worker) -> None:
        """`healthy`, `reachable`, `responsive` or `refusal` is another one."""

    def lost(self, worker: Worker) -> None:
        """It has not answered for `worker_timeout_s`. Said once, until it answers again."""


class Probes:
    """The tasks of one worker, from `start` until `stop`."""

    def __init__(self, worker: Worker, listener: Listener, *, worker_timeout_s: float) -> None:
        self._worker = worker
        self._listener = listener
        self._timeout_s = worker_timeout_s
        self._call_timeout_s = min(_CALL_TIMEOUT_S, worker_timeout_s / 2)
        self._interval_s = min(_POLL_INTERVAL_S, worker_timeout_s / 4)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for run in (self._watch_health, self._poll_load):
            self._tasks.append(asyncio.create_task(self._forever(run)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _forever(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await run()
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
            except Exception:  # whatever a worker sends, the others go on, and so does this one
                logger.exception("%s: probing failed", self._worker.label)
            await asyncio.sleep(_MAX_BACKOFF_S)

    # -- health --

    async def _watch_health(self) -> None:
        worker, backoff_s = self._worker, _FIRST_BACKOFF_S
        while True:
            pause_s = backoff_s
            # No deadline: the watch lasts as long as the worker, and keep-alive pings end it where that is gone.
            call = worker.health.Watch(health_pb2.HealthCheckRequest())
            try:
                async for response in call:
                    backoff_s = _FIRST_BACKOFF_S
                    await self._heard(response.status == _SERVING)
                self._silent(reachable=False)
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                self._silent(reachable=False)  # the server cancelled it: its drain ran out of time
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    pause_s = self._unfit("it does not speak grpc.health.v1")
                else:
                    self._silent(reachable=error.code() is not grpc.StatusCode.UNAVAILABLE)
            finally:
                call.cancel()
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _heard(self, serves: bool) -> None:
        worker = self._worker
        worker.reachable = worker.responsive = True
        if serves:
            try:
                info = await worker.stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=self._call_timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                    raise  # the watch begins anew
                self._unfit(f"it serves no {worker.stage}")
                return
            self._listener.met(worker, info)
        worker.healthy = serves
        self._listener.changed(worker)

    def _silent(self, *, reachable: bool) -> None:
        self._worker.reachable = reachable
        self._worker.healthy = False
        self._listener.changed(self._worker)

    def _unfit(self, reason: str) -> float:
        worker = self._worker
        if worker.refusal != reason:
            logger.error("%s is left out: %s", worker.label, reason)
        worker.reachable, worker.healthy, worker.info, worker.refusal = True, False, None, reason
        self._listener.changed(worker)
        return _UNFIT_BACKOFF_S

    # -- load --

    async def _poll_load(self) -> None:
        worker, loop = self._worker, asyncio.get_running_loop()
        answered_s, misses = loop.time(), 0
        while True:
            await asyncio.sleep(self._interval_s * random.uniform(0.8, 1.2))
            if not worker.healthy:
                answered_s, misses = loop.time(), 0
                continue
            answer = await _within(worker.stub.GetLoad, self._call_timeout_s)
            if isinstance(answer, common_pb2.Load):
                answered_s, misses = loop.time(), 0
                worker.report(answer)
                self._set_responsive(True)
            elif answer is grpc.StatusCode.DEADLINE_EXCEEDED:
                misses += 1
                self._set_responsive(False)
                if misses >= _MISSES_OF_A_LOST_WORKER and loop.time() - answered_s >= self._timeout_s:
                    logger.error("%s has not answered for %.1f s", worker.label, loop.time() - answered_s)
                    answered_s = loop.time()
                    self._listener.lost(worker)

    def _set_responsive(self, responsive: bool) -> None:
        if self._worker.responsive != responsive:
            self._worker.responsive = responsive
            self._listener.changed(self._worker)


def _is_cancelled() -> bool:
    """Whether this task was asked to stop; else a CancelledError is grpc.aio's word for what the server cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _within(
    call: Callable[..., Awaitable[common_pb2.Load]], timeout_s: float
) -> common_pb2.Load | grpc.StatusCode:
    try:
        return await call(common_pb2.GetLoadRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return error.code()
