"""Giving up KV blocks that no decode worker will pull.

A request that was cancelled cannot wait for this itself, so each release is a task of its own, tracked until it ends.
Its failure is harmless: the lease then expires.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from protos import common_pb2, prefill_pb2
from router.workers import Worker

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class Releases:
    """One event loop. Holds at most one short-lived task for each request in flight."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def give_up(self, worker: Worker, request_id: str, kv: common_pb2.KvHandle | None) -> None:
        """Tell the prefill worker that made `kv`, or whose reply with the handle will not be read: then it is None, and
        whatever was handed over for the call `request_id` is meant. Returns at once; safe to call while being
        cancelled. A decode worker that is pulling the blocks is told that they were given up, and counts no failure."""
        request = prefill_pb2.ReleaseRequest(request_id=request_id, kv=kv)
        task = asyncio.create_task(self._release(worker, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, worker: Worker, request: prefill_pb2.ReleaseRequest) -> None:
        try:
            await worker.stub.Release(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.warning("release at %s failed, the lease will expire: %s", worker.address, error.details())

    async def close(self) -> None:
        """Wait for those under way; each ends within its own deadline."""
        if self._tasks:
            await asyncio.wait(self._tasks)
