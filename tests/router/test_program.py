"""`python -m router serve` as a process: its ready line, its refusals, and how it stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core.ports import free_ports
from protos import router_pb2_grpc
from tests.router.stubs import Stub, StubDecode, StubEncoder, StubPrefill, chat, collect

ROOT = Path(__file__).resolve().parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def stages(**decode_info: object) -> AsyncIterator[list[Stub]]:
    prefill = StubPrefill()
    stubs = [StubEncoder(), prefill, StubDecode([prefill], **decode_info)]
    for stub in stubs:
        await stub.start()
    try:
        yield stubs
    finally:
        for stub in stubs:
            await stub.stop()


def addresses(stubs: list[Stub]) -> list[str]:
    return [part for stub in stubs for part in (f"--{stub.stage}", stub.address)]


@asynccontextmanager
async def program(*args: str, run: tuple[str, ...] = ("-m", "router")) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *run, "serve", "--host", "127.0.0.1", *args,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")},
    )  # fmt: skip
    try:
        async with asyncio.timeout(100):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(process: asyncio.subprocess.Process) -> dict[str, str]:
    line = (await process.stdout.readline()).decode()
    assert line.startswith("ready router grpc="), line
    return dict(word.split("=", 1) for word in line.split()[2:])


async def test_serves_and_drains_on_sigterm() -> None:
    async with stages() as stubs, program("--port", "0", "--http-port", "0", *addresses(stubs)) as process:
        where = await ready(process)
        async with grpc.aio.insecure_channel(where["grpc"]) as channel, aiohttp.ClientSession() as http:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "triptych.v1.Router"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            async for listed in reflection.ServerReflectionInfo(iter([asked])):
                assert "triptych.v1.Router" in {s.name for s in listed.list_services_response.service}
            for path, expected in (("health", "ok"), ("ready", "ready"), ("metrics", "triptych:router_retries_total")):
                async with http.get(f"http://{where['http']}/{path}") as response:
                    assert response.status == 200
                    assert expected in await response.text()
            stub = router_pb2_grpc.RouterStub(channel)
            stubs[2].gate = asyncio.Event()
            call = asyncio.ensure_future(collect(stub.Generate(chat("hello"), timeout=20)))
            await stubs[2].entered.get()
            process.send_signal(signal.SIGTERM)
            while True:
                async with http.get(f"http://{where['http']}/ready") as response:
                    if response.status == 503:
                        break
            stubs[2].gate.set()
            token_ids, _, _ = await call
            assert len(token_ids) == 5
        assert await process.wait() == 0


async def test_it_is_ready_without_its_workers_and_says_which_it_lacks() -> None:
    """Readiness says that it takes requests. Were it to follow the workers, all routers would go with them."""
    async with stages() as stubs:
        stubs[1].server.set_serving(False)
        port, http_port = free_ports(2)
        args = ("--port", str(port), "--http-port", str(http_port), *addresses(stubs))
        async with (
            program(*args, run=("router",)) as process,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
            aiohttp.ClientSession() as http,
        ):
            while b"waiting for prefill" not in await process.stderr.readline():
                pass
            health = health_pb2_grpc.HealthStub(channel)

            async def becomes(service: str, status: int) -> None:
                async for answer in health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=20):
                    if answer.status == status:
                        return

            await becomes("triptych.v1.Router", SERVING)
            await becomes("", SERVING)
            await becomes("encoder", SERVING)
            await becomes("prefill", NOT_SERVING)
            async with http.get(f"http://127.0.0.1:{http_port}/ready") as response:
                assert (response.status, await response.text()) == (200, "ready\nno worker serves prefill\n")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await collect(router_pb2_grpc.RouterStub(channel).Generate(chat("hello"), timeout=20))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert refused.value.details() == "prefill is unavailable: none of its workers serves yet"
            assert dict(refused.value.trailing_metadata() or ())["retry-after"] == "1"
            stubs[1].server.set_serving(True)
            await ready(process)  # this line is said only now
            await becomes("prefill", SERVING)
            assert len((await collect(router_pb2_grpc.RouterStub(channel).Generate(chat("hello"), timeout=20)))[0]) == 5
            stubs[1].server.set_serving(False)
            await becomes("prefill", NOT_SERVING)
            await becomes("", SERVING)
            stubs[1].failures = [(grpc.StatusCode.UNAVAILABLE, "prefill is unavailable: its engine died")] * 9
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await collect(router_pb2_grpc.RouterStub(channel).Generate(chat("hello"), timeout=20))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(refused.value.trailing_metadata() or ())["retry-after"] == "1"


async def test_stages_that_disagree_are_refused_with_both_values() -> None:
    for field, values in {
        "family": ("qwen3_vl", "other"),
        "namespace_digest": ("ab" * 32, "cd" * 32),
        "embed_width": ("8", "16"),
        "kv_layout": ("layout-1", "layout-2"),
    }.items():
        theirs = int(values[1]) if field == "embed_width" else values[1]
        async with (
            stages(**{field: theirs}) as stubs,
            program("--port", "0", "--http-port", "0", *addresses(stubs)) as process,
        ):
            out, err = await process.communicate()
            assert process.returncode == 2
            assert out == b""
            last = err.decode().splitlines()[-1]
            assert last.startswith("error: ")
            assert all(value in last for value in (field.replace("family", "model family"), *values))


async def test_a_bad_start_names_option_and_value() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        workers = ["--encoder", "localhost:1", "--prefill", "localhost:2", "--decode", "localhost:3"]
        for args, expected in (
            ([*workers, "--port", port, "--http-port", "0"], ("--port", port)),
            ([*workers, "--port", "0", "--http-port", port], ("--http-port", port)),
            ([*workers[:4], "--decode", "localhost"], ("--decode", "'localhost'")),
            ([*workers, "--max-inflight", "none"], ("--max-inflight", "'none'")),
        ):
            async with program(*args) as process:
                _, err = await process.communicate()
                assert process.returncode == 2
                assert all(text in err.decode().splitlines()[-1] for text in expected), err
