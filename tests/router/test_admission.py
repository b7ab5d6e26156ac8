"""What the router takes on: by predicted work, fairly, with a word on when to come again."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from core.errors import InvalidRequestError, OverloadedError
from core.pace import Pace
from core.retry_after import retry_after_s
from protos import retry_pb2
from router.admission import Admission
from router.metrics import RouterMetrics
from router.settings import RouterSettings
from router.shares import Shares
from router.tenants import tenant_of
from router.turns import Turns
from tests.router.stubs import chat, cluster, collect, until


def turns(limit: float, *, max_queue: int = 8, max_queue_s: float = 60.0, is_fair: bool = False) -> Turns:
    return Turns(lambda: limit, max_queue=max_queue, max_queue_s=max_queue_s, is_fair=is_fair, metrics=RouterMetrics())


class Request:
    """One that waits for its turn in a task of its own, and holds it until it is told to end."""

    def __init__(self, turns: Turns, name: str, cost: int, begun: list[str], *, tenant: str = "", priority: int = 0):
        self.end = asyncio.Event()

        async def run() -> None:
            async with turns.turn(tenant, cost, priority):
                begun.append(name)
                await self.end.wait()

        self.task = asyncio.create_task(run())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def run_out(requests: list[Request]) -> None:
    for request in requests:
        request.end.set()
        await settled()
    await asyncio.gather(*(request.task for request in requests))


# ---- turns ----


async def test_work_waits_where_there_is_too_much_and_goes_on_in_order() -> None:
    gate, begun = turns(100), []
    requests = [Request(gate, name, cost, begun) for name, cost in (("a", 60), ("b", 60), ("c", 30), ("d", 500))]
    await settled()
    # c would fit, but what came first goes first: else what is large would wait for ever.
    assert (begun, gate.work, gate.num_waiting) == (["a"], 60, 3)
    requests[0].end.set()
    await settled()
    assert begun == ["a", "b", "c"]
    await run_out(requests)
    assert begun[3] == "d"  # larger than the limit: alone
    assert (gate.work, gate.num_waiting, gate.num_running) == (0, 0, 0)


async def test_no_limit_lets_everything_in() -> None:
    gate, begun = turns(0), []
    requests = [Request(gate, str(i), 10**9, begun) for i in range(20)]
    await settled()
    assert len(begun) == 20
    await run_out(requests)


async def test_a_tenant_with_one_request_does_not_wait_for_one_with_many() -> None:
    gate, begun = turns(10, max_queue=100), []
    greedy = [Request(gate, f"greedy{i}", 10, begun, tenant="greedy") for i in range(10)]
    await settled()
    small = [Request(gate, f"small{i}", 10, begun, tenant="small") for i in range(2)]
    await settled()
    await run_out([*greedy[:5], *small, *greedy[5:]])
    assert begun.index("small0") <= 2
    assert begun.index("small1") <= 4


async def test_priority_goes_before_tenants() -> None:
    gate, begun = turns(10), []
    requests = [Request(gate, "first", 10, begun), Request(gate, "late", 10, begun)]
    await settled()
    requests.append(Request(gate, "urgent", 10, begun, priority=-5))
    await settled()
    await run_out([requests[0], requests[2], requests[1]])
    assert begun == ["first", "urgent", "late"]


async def test_those_who_leave_the_queue_hold_nothing() -> None:
    gate, begun = turns(10, max_queue=100), []
    async with gate.turn("", 10):
        requests = [Request(gate, str(i), 10, begun) for i in range(50)]
        await settled()
        for request in requests[:49]:
            request.task.cancel()
        await settled()
        assert gate.num_waiting == 1
        requests.append(Request(gate, "last", 10, begun))
        await settled()
    # Let in, and cancelled before it could know: the turn is not lost.
    assert gate.work == 10
    requests[49].task.cancel()
    await settled()
    assert begun == ["last"]
    requests[-1].end.set()
    await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
    assert (gate.work, gate.num_waiting, gate.num_running, len(gate._heap)) == (0, 0, 0, 0)


async def test_a_queue_that_is_full_or_too_long_refuses_at_once_and_says_until_when() -> None:
    gate, begun = turns(10, max_queue=2), []
    requests = [Request(gate, str(i), 10, begun) for i in range(3)]
    await settled()
    with pytest.raises(OverloadedError, match="queue is full: 2 are held, the limit is 2") as refused:
        async with gate.turn("", 10):
            pass
    assert refused.value.retry_after_s is not None
    await run_out(requests)
    slow = turns(10, max_queue_s=0.5)
    running = Request(slow, "running", 10, begun)
    await settled()
    with pytest.raises(OverloadedError, match=r"1 s long, the limit is 0\.5"):  # nothing is known of its pace yet
        async with slow.turn("", 10):
            pass
    await run_out([running])


def test_the_pace_says_how_long_work_takes() -> None:
    pace = Pace(0.0)
    assert pace.time_for(100) == 1.0
    for second in range(1, 31):
        pace.note(float(second), was_busy=True, done=50)
    assert pace.time_for(500) == pytest.approx(10, rel=0.05)
    for second in range(31, 61):  # idle time is no slowness
        pace.note(float(second), was_busy=False)
    assert pace.time_for(500) == pytest.approx(10, rel=0.05)
    for second in range(61, 161):
        pace.note(float(second), was_busy=True, done=5)
    assert pace.time_for(50) == pytest.approx(10, rel=0.2)
    assert (pace.time_for(0), pace.time_for(1e9)) == (0.1, 60.0)


# ---- shares ----


def test_there_is_always_room_for_one_more_tenant() -> None:
    shares = Shares(12, is_fair=True)
    while shares.shortage("greedy", 1) is None:
        shares.take("greedy", 1)
    assert shares.held == 6
    assert "its share of the limit is 6 now" in shares.shortage("greedy", 1)
    for tenant in ("b", "c", "d"):
        assert shares.shortage(tenant, 1) is None
        shares.take(tenant, 1)
    assert "is 2 now" in shares.shortage("greedy", 1)
    shares.take("b", 3)
    assert "12 are held" in shares.shortage("new", 1)
    for tenant, amount in (("greedy", 6), ("b", 4), ("c", 1), ("d", 1)):
        shares.give_back(tenant, amount)
    assert (shares.held, shares._by_tenant) == (0, {})


def test_without_tenants_the_limit_is_one() -> None:
    shares = Shares(3, is_fair=False)
    for _ in range(3):
        assert shares.shortage("", 1) is None
        shares.take("", 1)
    assert shares.shortage("", 1) == "3 are held, the limit is 3"


# ---- through the front door ----


async def test_a_refusal_says_when_to_come_again_to_each_kind_of_client() -> None:
    async with cluster(max_inflight=1) as c:
        c.prefills[0].gate = asyncio.Event()
        held = asyncio.ensure_future(collect(c.stub.Generate(chat("hello"), timeout=10)))
        async with asyncio.timeout(30):
            await c.prefills[0].entered.get()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(c.stub.Generate(chat("hello")))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(refused.value.trailing_metadata())
        assert trailing["retry-after"] == "1"
        assert retry_after_s(trailing.items()) == 1.0
        status = retry_pb2.RpcStatus.FromString(trailing["grpc-status-details-bin"])
        assert (status.code, status.message) == (8, refused.value.details())
        (detail,) = status.details
        assert isinstance(detail, AnyMessage)
        assert detail.type_url == "type.googleapis.com/google.rpc.RetryInfo"
        assert retry_pb2.RetryInfo.FromString(detail.value).retry_delay.ToMilliseconds() == 1000
        assert c.metrics.counters()['router_rejected_total{reason="inflight"}'] == 1
        assert c.metrics.counters()['router_requests_total{outcome="refused"}'] == 1
        c.prefills[0].gate.set()
        await held


async def test_requests_wait_at_the_router_while_all_hands_are_full() -> None:
    async with cluster(max_work=300, max_queue=1) as c:
        c.prefills[0].gate = asyncio.Event()
        calls = [
            asyncio.ensure_future(collect(c.stub.Generate(chat("hello", max_tokens=200), timeout=20))) for _ in range(2)
        ]
        await until(lambda: c.metrics.waiting._value.get() == 1 and bool(c.prefills[0].requests))
        assert len(c.prefills[0].requests) == 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(c.stub.Generate(chat("hello", max_tokens=200)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the router's queue is full" in refused.value.details()
        c.prefills[0].gate.set()
        for token_ids, _, _ in await asyncio.gather(*calls):
            assert len(token_ids) == 200
        assert c.metrics.waiting._value.get() == 0
        assert c.metrics.counters()['router_rejected_total{reason="queue"}'] == 1


async def test_the_tenant_comes_from_the_header_where_it_is_trusted() -> None:
    metadata = (("x-tenant-id", "red"),)
    for trusted, tenant in ((True, "red"), (False, "")):
        async with cluster(trust_tenant_header=trusted) as c:
            await collect(c.stub.Generate(chat(b"picture", "?"), metadata=metadata))
            assert {stub.requests[0].tenant for stub in (*c.encoders, *c.prefills, *c.decodes)} == {tenant}
    with pytest.raises(InvalidRequestError, match="given 2 times"):
        tenant_of([*metadata, *metadata], trust_header=True)
    with pytest.raises(InvalidRequestError, match="x-tenant-id has 300 characters"):
        tenant_of([("x-tenant-id", "x" * 300)], trust_header=True)


async def test_one_tenant_cannot_take_all_places() -> None:
    settings = RouterSettings(encoders=(), prefills=(), decodes=(), max_inflight=4, trust_tenant_header=True)
    admission = Admission(settings, RouterMetrics(), lambda: 0)
    async with AsyncExitStack() as held:
        held.enter_context(admission.request("greedy"))
        held.enter_context(admission.request("greedy"))
        with pytest.raises(OverloadedError, match="its share of the limit is 2 now"), admission.request("greedy"):
            pass
        held.enter_context(admission.request("other"))
        assert admission.num_running == 3
    assert admission.num_running == 0
