"""Which workers get calls: health, outcomes, breakers, and who fits whom. On real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from core.errors import IncompatibleError
from core.types import Stage
from protos import common_pb2
from router.assignment import Assignment
from router.breaker import Breaker
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.settings import RouterSettings
from router.work import Work
from router.workers import Worker
from tests.router.stubs import Stub, StubDecode, StubEncoder, StubPrefill, until

DECODE = Work(stage=Stage.DECODE, cost=1)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class SilentDecode(StubDecode):
    """Answers no GetLoad while `silent`, and else `load`."""

    silent = False
    load = common_pb2.Load()

    async def GetLoad(self, request, context):  # noqa: N802
        if self.silent:
            await asyncio.Event().wait()
        return self.load


class NoService(Stub):
    """Speaks gRPC, and serves nothing that a router knows."""

    service_name = "triptych.v1.Other"

    def add_to(self, server) -> None: ...


@asynccontextmanager
async def fleet_of(
    *decodes: Stub, serving: bool = True, settings: dict | None = None, encoder: Stub | None = None
) -> AsyncIterator[Fleet]:
    """An encoder, a prefill worker and these decode workers."""
    stubs = [encoder or StubEncoder(), StubPrefill(), *decodes]
    addresses = [await stub.start() for stub in stubs]
    config = RouterSettings(
        encoders=(addresses[0],), prefills=(addresses[1],), decodes=tuple(addresses[2:]), **(settings or {})
    )
    fleet = Fleet(config, RouterMetrics())
    try:
        async with asyncio.timeout(30):
            if serving:
                await fleet.wait_until_serving()
            yield fleet
    finally:
        await fleet.close()
        for stub in stubs:
            await stub.stop()


def by_address(fleet: Fleet, stub: Stub) -> Worker:
    return next(worker for worker in fleet.workers() if worker.address == stub.address)


def failing(code: grpc.StatusCode, details: str = "it broke") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def chosen(fleet: Fleet, work: Work = DECODE, times: int = 6) -> set[Worker]:
    found = set()
    for _ in range(times):
        assignment = fleet.choose(work)
        assert assignment is not None
        with assignment:
            found.add(assignment.worker)
    return found


def take(fleet: Fleet, worker: Worker) -> Assignment:
    others = [other for other in fleet.decodes.workers if other is not worker]
    assignment = fleet.choose(DECODE, avoid=others)
    assert assignment is not None
    assert assignment.worker is worker
    return assignment


# ---- health and outcomes ----


async def test_health_is_followed_at_once_and_the_last_one_is_tried_all_the_same() -> None:
    one, other = StubDecode([]), StubDecode([])
    async with fleet_of(one, other) as fleet:
        first, second = by_address(fleet, one), by_address(fleet, other)
        await until(lambda: first.serving and second.serving)
        assert chosen(fleet) == {first, second}
        one.server.set_serving(False)
        await until(lambda: not first.serving)
        assert chosen(fleet) == {second}
        other.server.set_serving(False)
        await until(lambda: not second.serving)
        assert [pool.stage for pool in fleet.missing()] == [Stage.DECODE]
        assert len(chosen(fleet)) == 1
        assert fleet.choose(DECODE, avoid=[first, second]) is None
        one.server.set_serving(True)
        await until(lambda: first.serving)
        assert chosen(fleet) == {first}


async def test_load_is_counted_until_the_call_ends_however_it_does() -> None:
    async with fleet_of(StubDecode([])) as fleet:
        (worker,) = fleet.decodes.workers
        work = fleet.decode_work(prompt_tokens=100, max_tokens=50)
        ends = (
            lambda a: a.succeeded(),
            lambda a: a.failed(failing(grpc.StatusCode.INVALID_ARGUMENT)),
            lambda a: a.misbehaved("nonsense"),
            lambda a: None,
        )
        for end in ends:
            assignment = fleet.choose(work)
            assert (worker.calls, worker.cost, worker.kv_tokens) == (1, 50, 150)
            with assignment:
                end(assignment)
                assignment.succeeded()  # a second word changes nothing
            assert (worker.calls, worker.cost, worker.kv_tokens) == (0, 0, 0)
        assert not worker.assignments


async def test_what_a_worker_reports_beyond_our_calls_is_others() -> None:
    decode = SilentDecode([], kv_block_size=16)
    decode.load = common_pb2.Load(num_requests_running=3, num_requests_waiting=2, kv_blocks_total=64, kv_blocks_held=10)
    async with fleet_of(decode, settings={"worker_timeout_s": 0.2}) as fleet:
        (worker,) = fleet.decodes.workers
        with take(fleet, worker):
            await until(lambda: worker.load is not None)
            assert (worker.other_calls, worker.waiting) == (4, 2)
            assert (worker.kv_capacity, worker.other_kv_tokens) == (1024, 160)


async def test_a_connection_that_fails_opens_the_breaker_and_the_workers_return_closes_it() -> None:
    one, other = StubDecode([]), StubDecode([])
    async with fleet_of(one, other) as fleet:
        first, second = by_address(fleet, one), by_address(fleet, other)
        await until(lambda: first.serving and second.serving)
        with take(fleet, first) as assignment:
            assignment.failed(failing(UNAVAILABLE, "connection refused"))
        assert chosen(fleet) == {second}
        assert first.state == "failing"
        assert fleet._metrics.counters()['router_breaker_opens_total{stage="decode"}'] == 1
        await until(lambda: first.breaker.allows(asyncio.get_running_loop().time()))
        probe = take(fleet, first)
        assert chosen(fleet) == {second}  # one probe at a time
        with probe:
            probe.succeeded()
        assert chosen(fleet) == {first, second}


async def test_a_worker_that_lies_about_its_health_is_found_out_by_what_it_does() -> None:
    one, other = StubDecode([]), StubDecode([])
    async with fleet_of(one, other) as fleet:
        first, second = by_address(fleet, one), by_address(fleet, other)
        await until(lambda: first.serving and second.serving)
        for i in range(3):
            assert chosen(fleet) == {first, second}, i
            with take(fleet, first) as assignment:
                if i == 1:
                    assignment.misbehaved("a token that no model has")
                else:
                    assignment.failed(failing(UNAVAILABLE, "decode is unavailable: its engine died"))
        assert first.healthy
        assert chosen(fleet) == {second}


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DEADLINE_EXCEEDED],
)
async def test_a_clients_own_fault_speaks_against_nobody(code: grpc.StatusCode) -> None:
    async with fleet_of(StubDecode([])) as fleet:
        (worker,) = fleet.decodes.workers
        for _ in range(5):
            with take(fleet, worker) as assignment:
                assignment.failed(failing(code))
        assert worker.breaker.closed


async def test_a_full_worker_is_not_the_first_choice_for_a_moment() -> None:
    one, other = StubDecode([]), StubDecode([])
    async with fleet_of(one, other) as fleet:
        first, second = by_address(fleet, one), by_address(fleet, other)
        await until(lambda: first.serving and second.serving)
        with take(fleet, first) as assignment:
            assignment.failed(failing(grpc.StatusCode.RESOURCE_EXHAUSTED))
        assert first.breaker.closed
        assert chosen(fleet) == {second}
        with take(fleet, second) as assignment:
            assignment.failed(failing(grpc.StatusCode.RESOURCE_EXHAUSTED))
        assert chosen(fleet) == {first, second}


async def test_a_silent_worker_is_lost_and_those_who_wait_for_it_are_told() -> None:
    silent, other = SilentDecode([]), StubDecode([])
    async with fleet_of(silent, other, settings={"worker_timeout_s": 1.0}) as fleet:
        first, second = by_address(fleet, silent), by_address(fleet, other)
        await until(lambda: first.serving and second.serving)
        told = asyncio.Event()
        with take(fleet, first) as assignment:
            assignment.on_lost = told.set
            silent.silent = True
            await until(lambda: first.state == "silent")
            assert chosen(fleet) == {second}
            await told.wait()
            assert assignment.lost
        silent.silent = False
        await until(lambda: first.serving and first.breaker.allows(asyncio.get_running_loop().time()))
        assert chosen(fleet) == {first, second}


def test_the_breaker_opens_longer_each_time_and_closes_for_good() -> None:
    breaker, now_s = Breaker(), 0.0
    pauses = []
    for _ in range(8):
        breaker.fail(now_s, hard=True)
        breaker.fail(now_s, hard=True)  # of the same moment: no second pause
        assert not breaker.allows(now_s)
        pause_s = next(tenth / 10 for tenth in range(1000) if breaker.allows(now_s + tenth / 10))
        pauses.append(pause_s)
        now_s += pause_s
        assert breaker.begin()
        assert not breaker.allows(now_s)
        breaker.end_probe()
    assert 0.3 <= pauses[0] <= 0.7
    assert pauses[3] > 2 * pauses[0]
    assert max(pauses) <= 15 * 1.25 + 0.1
    breaker.succeed()
    assert breaker.closed
    assert not breaker.begin()
    assert [breaker.fail(now_s, hard=False) for _ in range(3)] == [False, False, True]


# ---- who fits whom ----


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("family", "other", "model family"),
        ("namespace_digest", "cd" * 32, "cd" * 32),
        ("embed_width", 16, "16"),
        ("kv_layout", "layout-2", "layout-2"),
        ("version", "99.1.0", "99.1"),
        ("stage", "prefill", "'prefill', not 'decode'"),
        ("max_model_len", 0, "max_model_len is 0"),
        ("namespace_digest", "garbage", "not 64 hexadecimal digits"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_by_name_and_the_others_serve(
    field: str, value: object, said: str
) -> None:
    fits, other = StubDecode([]), StubDecode([], **{field: value})
    async with fleet_of(other, fits) as fleet:
        first, second = by_address(fleet, fits), by_address(fleet, other)
        await until(lambda: second.refusal is not None)
        assert said in second.refusal
        assert second.state == "refused"
        assert chosen(fleet) == {first}
        assert fleet.choose(DECODE, avoid=[first]) is None  # not even as a last resort
        assert fleet.max_model_len == 4096


async def test_a_server_of_something_else_is_refused_and_asked_again() -> None:
    fits, other = StubDecode([]), NoService()
    async with fleet_of(fits, other) as fleet:
        worker = by_address(fleet, other)
        await until(lambda: worker.refusal is not None)
        assert worker.refusal == "it serves no decode"
        assert chosen(fleet) == {by_address(fleet, fits)}


async def test_one_process_under_two_addresses_is_used_once() -> None:
    decode = StubDecode([], instance_id="the same")
    async with fleet_of(decode) as fleet:
        fleet.add(Stage.DECODE, decode.address.replace("127.0.0.1", "localhost"))
        await until(lambda: any(worker.refusal for worker in fleet.decodes.workers))
        assert "the same process as" in fleet.decodes.workers[1].refusal
        assert chosen(fleet) == {fleet.decodes.workers[0]}


async def test_lists_that_can_never_serve_together_end_the_start_with_both_values() -> None:
    async with fleet_of(StubDecode([], embed_width=16), serving=False) as fleet:
        with pytest.raises(IncompatibleError, match=r"embed_width differs .* 8 .* 16 "):
            await fleet.wait_until_serving()
    async with fleet_of(NoService(), serving=False) as fleet:
        with pytest.raises(IncompatibleError, match=r"decode .* it serves no decode"):
            await fleet.wait_until_serving()


async def test_new_weights_take_over_once_the_old_have_lost_a_stage() -> None:
    old, new = StubDecode([]), StubDecode([], namespace_digest="cd" * 32)
    more = [StubEncoder(namespace_digest="cd" * 32), StubPrefill(namespace_digest="cd" * 32)]
    async with fleet_of(old, new) as fleet:
        first, second = by_address(fleet, old), by_address(fleet, new)
        for stub in more:
            fleet.add(Stage(stub.stage), await stub.start())
        await until(lambda: sum(worker.refusal is not None for worker in fleet.workers()) == 3)
        assert fleet.namespace == "ab" * 32
        await old.stop()
        await until(lambda: second.refusal is None)
        assert fleet.namespace == "cd" * 32
        assert not fleet.missing()
        assert chosen(fleet) == {second}
        for stub in more:
            await stub.stop()
        await until(lambda: not first.reachable)


# ---- coming and going ----


async def test_a_worker_that_leaves_gets_no_new_calls_and_keeps_those_it_has() -> None:
    one, other = StubDecode([]), StubDecode([])
    async with fleet_of(one, other) as fleet:
        first, second = by_address(fleet, one), by_address(fleet, other)
        await until(lambda: first.serving and second.serving)
        with take(fleet, first) as assignment:
            assert fleet.remove(Stage.DECODE, one.address)
            assert not fleet.remove(Stage.DECODE, one.address)
            assert first.state == "leaving"
            assert chosen(fleet) == {second}
            load = await first.stub.GetLoad(common_pb2.GetLoadRequest(), timeout=5)
            assert load == common_pb2.Load()
            assignment.succeeded()
        assert fleet.add(Stage.DECODE, one.address)
        await until(lambda: len(fleet.decodes.serving) == 2)
        assert by_address(fleet, one) is not first
