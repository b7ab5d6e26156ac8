"""Shared work: begun once, cancelled with its last waiter, forgotten when done."""

from __future__ import annotations

import asyncio

import pytest

from router.inflight import Inflight


async def test_a_result_is_shared_and_not_kept() -> None:
    inflight: Inflight[str, int] = Inflight()
    gate, begun = asyncio.Event(), []

    async def work() -> int:
        begun.append(1)
        await gate.wait()
        return 7

    waiters = [asyncio.create_task(inflight.get("key", work)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*waiters) == [7, 7, 7]
    assert len(begun) == 1
    assert len(inflight) == 0
    assert await inflight.get("key", work) == 7
    assert len(begun) == 2


async def test_the_last_waiter_cancels_and_a_newcomer_begins_anew() -> None:
    inflight: Inflight[str, int] = Inflight()
    cancelled, begun = asyncio.Event(), asyncio.Queue()

    async def work() -> int:
        begun.put_nowait(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    waiters = [asyncio.create_task(inflight.get("key", work)) for _ in range(2)]
    await begun.get()
    for i, waiter in enumerate(waiters):
        assert not cancelled.is_set()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert len(inflight) == 1 - i
    # The old task has not even noticed yet; it must not be joined.
    again = asyncio.create_task(inflight.get("key", work))
    await begun.get()
    assert cancelled.is_set()
    assert len(inflight) == 1
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_a_failure_reaches_every_waiter() -> None:
    inflight: Inflight[str, int] = Inflight()

    async def work() -> int:
        await asyncio.sleep(0)
        raise ValueError("no")

    results = await asyncio.gather(*(inflight.get("key", work) for _ in range(2)), return_exceptions=True)
    assert [str(result) for result in results] == ["no", "no"]
    assert len(inflight) == 0
