"""What a request leaves behind in the router, however it ended: nothing."""

from __future__ import annotations

import asyncio
import gc
import logging

import grpc
import pytest

from tests.router.stubs import Cluster, chat, cluster, collect


async def ask(c: Cluster, times: int) -> None:
    """Whole answers, cancelled ones, ones that lost their decode worker, and refused ones."""
    for i in range(times):
        match i % 5:
            case 0:
                call = c.stub.Generate(chat(b"one", "?"), timeout=10)
                await call.read()
                call.cancel()
            case 1:
                c.decodes[0].lose_after = 1
                await collect(c.stub.Generate(chat(b"one", "?"), timeout=10))
            case 2:
                with pytest.raises(grpc.aio.AioRpcError, match="it has no bytes"):
                    await collect(c.stub.Generate(chat(b"one", b"", "?"), timeout=10))
            case _:
                await collect(c.stub.Generate(chat(b"one", "?"), timeout=10))


async def num_objects(c: Cluster) -> int:
    for stub in (*c.encoders, *c.prefills, *c.decodes):
        stub.requests.clear()
        stub.time_left_s.clear()
        stub.entered = asyncio.Queue()
    c.prefills[0].released = asyncio.Queue()
    await asyncio.sleep(0.3)  # the ends of cancelled calls, which nobody awaits
    gc.collect()
    return len(gc.get_objects())


async def test_requests_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # else pytest keeps every record
    async with cluster(decodes=2) as c:
        await ask(c, 100)
        before = await num_objects(c)
        await ask(c, 200)
        # Far less than one object a request: what grows with time, logs and metrics say.
        async with asyncio.timeout(60):
            while await num_objects(c) - before >= 100:
                pass  # a busy machine takes longer to end what was cancelled
        assert c.retries("decode", "lost") > 0
