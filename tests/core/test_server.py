"""The gRPC server's life cycle on real sockets, and the border where errors become statuses."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core.errors import (
    ConfigError,
    EngineError,
    IncompatibleError,
    InvalidRequestError,
    OverloadedError,
    StageUnavailableError,
)
from core.health import LIVENESS
from core.server import CHANNEL_OPTIONS, GrpcServer, address, guarded
from protos import decode_pb2, decode_pb2_grpc, encoder_pb2, encoder_pb2_grpc

ENCODER = "triptych.v1.Encoder"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WAIT_S = 30.0


class Servicer(encoder_pb2_grpc.EncoderServicer, decode_pb2_grpc.DecodeServicer):
    """Raises `error`, or waits for `gate`, inside the guard."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def _work(self) -> None:
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error

    async def Encode(self, request, context):  # noqa: N802
        async with guarded(context, "Encoder.Encode"):
            await self._work()
            return encoder_pb2.EncodeResponse(cached=True)

    async def Decode(self, request, context):  # noqa: N802
        async with guarded(context, "Decode.Decode"):
            yield decode_pb2.DecodeResponse(text="first")
            await self._work()


@asynccontextmanager
async def serving(servicer: Servicer) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer("127.0.0.1", 0)
    encoder_pb2_grpc.add_EncoderServicer_to_server(servicer, server.server)
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server.server)
    await server.start([ENCODER])
    async with grpc.aio.insecure_channel(server.bound, options=CHANNEL_OPTIONS) as channel:
        yield server, channel
    await server.drain(0)


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)).status


async def first_refusal(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How the server refuses a call, once it refuses one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await health_of(channel, "")
            except grpc.aio.AioRpcError as error:
                return error.code()


async def test_health_follows_set_serving_overall_and_by_name() -> None:
    async with serving(Servicer()) as (server, channel):
        assert [await health_of(channel, name) for name in ("", ENCODER)] == [NOT_SERVING, NOT_SERVING]
        server.set_serving(True)
        assert [await health_of(channel, name) for name in ("", ENCODER)] == [SERVING, SERVING]
        server.set_serving(False)
        assert await health_of(channel, ENCODER) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "triptych.v1.Nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_parts_have_a_status_of_their_own_until_the_drain() -> None:
    server = GrpcServer("127.0.0.1", 0)
    with pytest.raises(RuntimeError):
        server.set_parts({"one": True})
    await server.start([], parts=["one", "two"])
    async with grpc.aio.insecure_channel(server.bound) as channel:
        server.set_serving(True)
        assert [await health_of(channel, name) for name in ("", "one", "two")] == [SERVING, NOT_SERVING, NOT_SERVING]
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="one"), timeout=WAIT_S)
        assert (await watch.read()).status == NOT_SERVING
        server.set_parts({"one": True, "two": False})
        assert (await watch.read()).status == SERVING
        assert await health_of(channel, "two") == NOT_SERVING
        with pytest.raises(KeyError):
            server.set_parts({"three": True})
        drained = asyncio.create_task(server.drain(60))
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        await asyncio.wait_for(drained, WAIT_S)


async def test_liveness_is_no_readiness() -> None:
    """A process that loads its model, or drains, is alive: a probe that ends it then would end every large model."""
    async with serving(Servicer()) as (server, channel):
        for serves in (False, True, False):
            server.set_serving(serves)
            assert await health_of(channel, LIVENESS) == SERVING


async def test_watch_sees_each_change_and_does_not_hold_a_drain() -> None:
    async with serving(Servicer()) as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert (await watch.read()).status == NOT_SERVING
        server.set_serving(True)
        assert (await watch.read()).status == SERVING
        drained = asyncio.create_task(server.drain(60))
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        await asyncio.wait_for(drained, WAIT_S)


async def test_who_watches_hears_of_a_drain_before_calls_are_refused() -> None:
    """A call that crosses the word is served: a worker that goes costs its clients no second try."""
    async with serving(Servicer()) as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        server.set_serving(True)
        while (await watch.read()).status != SERVING:
            pass
        drained = asyncio.create_task(server.drain(60))
        assert (await watch.read()).status == NOT_SERVING
        stub = encoder_pb2_grpc.EncoderStub(channel)
        assert (await stub.Encode(encoder_pb2.EncodeRequest(), timeout=WAIT_S)).cached
        await asyncio.wait_for(drained, WAIT_S)
        assert await first_refusal(channel) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_reflection_lists_the_services() -> None:
    async with serving(Servicer()) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]), timeout=WAIT_S)
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {ENCODER, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_names_the_option() -> None:
    async with serving(Servicer()) as (server, _):
        with pytest.raises(ConfigError, match=rf"--port={server.port}: in use on 127\.0\.0\.1"):
            await GrpcServer("127.0.0.1", server.port).start([])


async def test_a_port_that_another_program_listens_on_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="in use"):
        await GrpcServer("127.0.0.1", other.getsockname()[1]).start([])


@pytest.mark.parametrize("host", ["nosuch.invalid", "192.0.2.1", "a" * 300])
async def test_a_host_that_is_not_ours_names_the_option(host: str) -> None:
    with pytest.raises(ConfigError, match="--host="):
        await GrpcServer(host, 0).start([])


def test_addresses_of_ipv6_get_brackets() -> None:
    assert address("::1", 1) == "[::1]:1"
    assert address("[::1]", 1) == "[::1]:1"
    assert address("localhost", 1) == "localhost:1"


async def test_set_serving_before_start_is_a_mistake() -> None:
    with pytest.raises(RuntimeError):
        GrpcServer("127.0.0.1", 0).set_serving(True)


async def test_a_drain_lets_calls_in_flight_finish_and_refuses_new_ones() -> None:
    servicer = Servicer()
    servicer.gate.clear()
    async with serving(servicer) as (server, channel):
        stub = encoder_pb2_grpc.EncoderStub(channel)
        call = stub.Encode(encoder_pb2.EncodeRequest(), timeout=WAIT_S)
        await asyncio.wait_for(servicer.entered.wait(), WAIT_S)
        drained = asyncio.create_task(server.drain(60))
        # A call that meets the drain half-way is CANCELLED by grpc; the router takes both for "try another worker".
        assert await first_refusal(channel) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert not drained.done()
        servicer.gate.set()
        assert (await call).cached
        await asyncio.wait_for(drained, WAIT_S)


async def test_a_drain_cancels_what_outlasts_its_grace() -> None:
    servicer = Servicer()
    servicer.gate.clear()
    async with serving(servicer) as (server, channel):
        call = encoder_pb2_grpc.EncoderStub(channel).Encode(encoder_pb2.EncodeRequest(), timeout=WAIT_S)
        await asyncio.wait_for(servicer.entered.wait(), WAIT_S)
        await asyncio.wait_for(server.drain(0.05), WAIT_S)
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError):
            await call


CASES = [
    (InvalidRequestError("image is empty"), grpc.StatusCode.INVALID_ARGUMENT, "image is empty"),
    (IncompatibleError("dtype", "a", "b"), grpc.StatusCode.FAILED_PRECONDITION, "ours is a, theirs is b"),
    (OverloadedError("queue is full"), grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full"),
    (StageUnavailableError("encoder", "it died"), grpc.StatusCode.UNAVAILABLE, "encoder is unavailable: it died"),
    (EngineError("no result"), grpc.StatusCode.INTERNAL, "no result"),
    (ValueError("secret /path"), grpc.StatusCode.INTERNAL, "internal error; the server's log has more"),
    (InvalidRequestError("x" * 100_000), grpc.StatusCode.INVALID_ARGUMENT, "x" * 2000),
]


@pytest.mark.parametrize(("error", "code", "details"), CASES, ids=[type(case[0]).__name__ for case in CASES])
async def test_errors_become_statuses_in_unary_and_streaming_calls(
    error: Exception, code: grpc.StatusCode, details: str
) -> None:
    servicer = Servicer()
    servicer.error = error
    async with serving(servicer) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await encoder_pb2_grpc.EncoderStub(channel).Encode(encoder_pb2.EncodeRequest(), timeout=WAIT_S)
        stream = decode_pb2_grpc.DecodeStub(channel).Decode(decode_pb2.DecodeRequest(), timeout=WAIT_S)
        assert (await stream.read()).text == "first"
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await stream.read()
        for caught in (unary.value, streamed.value):
            assert caught.code() is code
            assert details in (caught.details() or "")
            assert "secret" not in (caught.details() or "")


async def test_the_log_has_what_the_wire_has_not(caplog: pytest.LogCaptureFixture) -> None:
    servicer = Servicer()
    servicer.error = ValueError("secret /path")
    async with serving(servicer) as (_, channel):
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError):
            await encoder_pb2_grpc.EncoderStub(channel).Encode(encoder_pb2.EncodeRequest(), timeout=WAIT_S)
    assert "Encoder.Encode failed" in caplog.text
    assert "secret /path" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_cancel_reaches_the_handler() -> None:
    servicer = Servicer()
    servicer.gate.clear()
    async with serving(servicer) as (_, channel):
        call = encoder_pb2_grpc.EncoderStub(channel).Encode(encoder_pb2.EncodeRequest())
        await asyncio.wait_for(servicer.entered.wait(), WAIT_S)
        call.cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_explain_may_name_a_better_error() -> None:
    class Explaining(Servicer):
        async def Encode(self, request, context):  # noqa: N802
            async def explain(error: Exception) -> Exception:
                return StageUnavailableError("encoder", str(error))

            async with guarded(context, "Encoder.Encode", explain):
                raise EngineError("gone")

    async with serving(Explaining()) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError, match="encoder is unavailable: gone"):
            await encoder_pb2_grpc.EncoderStub(channel).Encode(encoder_pb2.EncodeRequest(), timeout=WAIT_S)


async def test_messages_of_many_megabytes_pass() -> None:
    async with serving(Servicer()) as (_, channel):
        request = encoder_pb2.EncodeRequest(image=bytes(32 * 1024 * 1024))
        assert (await encoder_pb2_grpc.EncoderStub(channel).Encode(request, timeout=WAIT_S)).cached


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
async def test_wait_for_signal_returns_the_first_and_survives_the_second(which: signal.Signals) -> None:
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    waiting = asyncio.create_task(GrpcServer("127.0.0.1", 0).wait_for_signal())
    await asyncio.sleep(0)  # the task's first turn installs the handlers
    assert signal.getsignal(signal.SIGINT) is not before
    try:
        os.kill(os.getpid(), which)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(waiting, WAIT_S) in (which, signal.SIGTERM)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
