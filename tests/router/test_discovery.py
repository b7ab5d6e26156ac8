"""Workers that come and go while the router runs: by name, and by the admin call."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest

from core.errors import ConfigError
from core.ports import free_ports
from core.server import GrpcServer
from core.types import Stage
from protos import admin_pb2, admin_pb2_grpc, common_pb2, router_pb2_grpc
from router.discovery import Discovery, resolve
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.settings import RouterSettings, parse_workers
from tests.router.stubs import Stub, StubDecode, chat, collect, until
from tests.router.test_program import ROOT, addresses, program, ready, stages

DNS = "dns:workers.test:7000"


class Resolver:
    """A DNS whose zone the test writes. `asked` grows with each question, of which `on_question` is told first."""

    def __init__(self) -> None:
        self.found: list[str] | OSError = []
        self.asked = 0
        self.on_question: Callable[[], None] = lambda: None

    async def __call__(self, name: str, port: int) -> list[str]:
        assert (name, port) == ("workers.test", 7000)
        self.asked += 1
        self.on_question()
        if isinstance(self.found, OSError):
            raise self.found
        return self.found

    async def says(self, found: list[str] | OSError, times: int = 1) -> None:
        """Change the zone, and return once it was asked for so often and the answer was dealt with."""
        self.found = found
        until_asked = self.asked + times + 1
        await until(lambda: self.asked >= until_asked)


@asynccontextmanager
async def discovery(**lists: tuple[str, ...]) -> AsyncIterator[tuple[Discovery, Fleet, Resolver, RouterMetrics]]:
    settings = RouterSettings(
        **{"encoders": (), "prefills": (), "decodes": (DNS,), **lists}, dns_interval_s=0.002, admin_port=0
    )
    metrics, resolver = RouterMetrics(), Resolver()
    fleet = Fleet(settings, metrics)
    found = Discovery(settings, fleet, metrics, resolve=resolver)
    task = asyncio.create_task(found.run())
    try:
        yield found, fleet, resolver, metrics
    finally:
        task.cancel()
        await asyncio.wait({task})
        await fleet.close()


def known(fleet: Fleet) -> list[str]:
    return sorted(worker.address for worker in fleet.workers())


# ---- names ----


async def test_a_name_is_resolved_again_and_its_workers_come_and_go() -> None:
    async with discovery() as (_, fleet, resolver, _):
        await resolver.says(["10.0.0.1:7000", "10.0.0.2:7000"])
        assert known(fleet) == ["10.0.0.1:7000", "10.0.0.2:7000"]
        kept = fleet.decodes.find("10.0.0.2:7000")
        await resolver.says(["10.0.0.2:7000", "10.0.0.3:7000"])
        assert known(fleet) == ["10.0.0.2:7000", "10.0.0.3:7000"]
        assert fleet.decodes.find("10.0.0.2:7000") is kept


async def test_a_resolver_that_fails_changes_nothing_and_is_counted() -> None:
    async with discovery() as (_, fleet, resolver, metrics):
        await resolver.says(["10.0.0.1:7000"])
        assert metrics.counters()["router_dns_failures_total"] == 0
        await resolver.says(OSError("temporary failure in name resolution"), times=5)
        assert known(fleet) == ["10.0.0.1:7000"]
        assert metrics.counters()["router_dns_failures_total"] >= 5


async def test_a_name_without_addresses_is_believed_when_it_says_so_again_and_again() -> None:
    async with discovery() as (_, fleet, resolver, _):
        await resolver.says(["10.0.0.1:7000"])
        known_then: list[list[str]] = []
        resolver.on_question = lambda: known_then.append(known(fleet))
        resolver.found = []
        await until(lambda: bool(known_then) and not known_then[-1])
        # Before the first empty answer, and after one and two of them.
        assert known_then[:4] == [["10.0.0.1:7000"]] * 3 + [[]]


async def test_who_is_named_twice_stays_until_nobody_names_it() -> None:
    async with discovery(decodes=("10.0.0.1:7000", DNS)) as (found, fleet, resolver, _):
        await resolver.says(["10.0.0.1:7000"])
        (worker,) = fleet.workers()
        assert found.sources(worker) == ["list", DNS]
        await resolver.says(["10.0.0.2:7000"])
        assert known(fleet) == ["10.0.0.1:7000", "10.0.0.2:7000"]
        assert found.add(Stage.DECODE, "10.0.0.2:7000") is False
        await resolver.says(["10.0.0.3:7000"])
        assert known(fleet) == ["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"]


async def test_who_was_removed_stays_away_whoever_names_it() -> None:
    async with discovery() as (found, fleet, resolver, _):
        await resolver.says(["10.0.0.1:7000"])
        assert found.remove(Stage.DECODE, "10.0.0.1:7000")
        assert not found.remove(Stage.DECODE, "10.0.0.1:7000")
        await resolver.says(["10.0.0.1:7000"], times=3)
        assert known(fleet) == []
        assert found.add(Stage.DECODE, "10.0.0.1:7000")
        assert known(fleet) == ["10.0.0.1:7000"]


async def test_the_systems_resolver_answers() -> None:
    assert await resolve("localhost", 7000) in (["127.0.0.1:7000"], ["[::1]:7000"])
    assert await resolve("127.0.0.5", 1) == ["127.0.0.5:1"]


def own_hosts_work() -> bool:
    """Whether this user may have a hosts file of its own."""
    command = ["unshare", "-rm", "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not own_hosts_work(), reason="needs a mount namespace of its own")
async def test_the_router_follows_a_real_name(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 workers.test\n")
    async with stages() as stubs:
        prefill = stubs[1]
        first, second = StubDecode([prefill]), StubDecode([prefill])
        port = 0  # any for the first, and the same for the second
        for stub, host in ((first, "127.0.0.2"), (second, "127.0.0.3")):
            stub.server = GrpcServer(host, port)
            stub.add_to(stub.server.server)
            port = await stub.server.start([stub.service_name])
            stub.server.set_serving(True)
        args = [*addresses(stubs[:2]), "--decode", f"dns:workers.test:{port}", "--dns-interval", "0.1"]
        process = await asyncio.create_subprocess_exec(
            "unshare", "-rm", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts),
            sys.executable, "-m", "router", "serve", "--port", "0", "--http-port", "0", *args,
            cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(100):
                where = await ready(process)
                async with grpc.aio.insecure_channel(where["grpc"]) as channel:
                    stub = router_pb2_grpc.RouterStub(channel)
                    await collect(stub.Generate(chat("hello")))
                    assert (len(first.requests), len(second.requests)) == (1, 0)
                    hosts.write_text("127.0.0.3 workers.test\n")
                    while not second.requests:
                        await collect(stub.Generate(chat("hello")))
                    seen = len(first.requests)
                    await collect(stub.Generate(chat("hello")))
                    assert len(first.requests) == seen
        finally:
            process.kill()
            await process.communicate()
            await first.stop()
            await second.stop()


# ---- the admin call ----


async def test_workers_come_and_go_by_the_admin_call_alone() -> None:
    none = ("--encoder", "none", "--prefill", "none", "--decode", "none")
    (port,) = free_ports(1)
    async with (
        stages() as stubs,
        program("--port", "0", "--http-port", "0", "--admin-port", str(port), *none) as process,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as admin_channel,
    ):
        admin = admin_pb2_grpc.AdminStub(admin_channel)
        for stub in stubs:
            request = admin_pb2.AddWorkerRequest(stage=stub.stage, address=stub.address)
            assert (await admin.AddWorker(request, wait_for_ready=True)).added
            assert not (await admin.AddWorker(request)).added
        where = await ready(process)
        assert where["admin"] == f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(where["grpc"]) as channel:
            router = router_pb2_grpc.RouterStub(channel)
            await collect(router.Generate(chat("hello"), timeout=20))
            other = StubDecode([stubs[1]], kv_layout="layout-2")
            await other.start()
            await admin.AddWorker(admin_pb2.AddWorkerRequest(stage="decode", address=other.address))
            while (refused := await listed(admin, other)).state != "refused":
                pass
            assert "kv_layout differs" in refused.reason
            assert list(refused.sources) == ["admin"]
            await admin.RemoveWorker(admin_pb2.RemoveWorkerRequest(stage="decode", address=other.address))
            assert await listed(admin, other) is None
            assert (await listed(admin, stubs[2])).state == "serving"
            await admin.RemoveWorker(admin_pb2.RemoveWorkerRequest(stage="decode", address=stubs[2].address))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(router.Generate(chat("hello"), timeout=20))
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert error.value.details().startswith("decode is unavailable")
            await other.stop()
        for stage, where_to, said in (("router", "h:1", "stage='router'"), ("decode", "no port", "address='no port'")):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await admin.AddWorker(admin_pb2.AddWorkerRequest(stage=stage, address=where_to))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in error.value.details()


async def test_there_is_no_admin_service_unless_asked_for() -> None:
    async with stages() as stubs, program("--port", "0", "--http-port", "0", *addresses(stubs)) as process:
        where = await ready(process)
        assert "admin" not in where
        async with grpc.aio.insecure_channel(where["grpc"]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await admin_pb2_grpc.AdminStub(channel).ListWorkers(admin_pb2.ListWorkersRequest())
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def listed(admin: admin_pb2_grpc.AdminStub, stub: Stub) -> admin_pb2.WorkerStatus | None:
    response = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10)
    return next((row for row in response.workers if row.address == stub.address), None)


# ---- lists ----


def test_lists_are_checked() -> None:
    assert parse_workers("--encoder", "a:1, dns:b.c:2,[::1]:3", admin=False) == ("a:1", "dns:b.c:2", "[::1]:3")
    assert parse_workers("--encoder", "none", admin=True) == ()
    for value in (
        "a",
        "a:0",
        "a:99999",
        "a:1,,b:2",
        "dns:a",
        "a:1,a:1",
        ":1",
        "unix:/x:1",
        "user@a:1",
        "::1:3",
        "none",
    ):
        with pytest.raises(ConfigError, match="--encoder="):
            parse_workers("--encoder", value, admin=False)


# ---- several processes ----


async def test_processes_share_a_port_and_one_that_dies_is_started_again() -> None:
    async with stages() as stubs:
        spare = StubDecode([stubs[1]])
        await spare.start()
        args = ("--port", "0", "--http-port", "0", "--admin-port", "0", "--processes", "2", *addresses(stubs))
        async with program(*args) as process:
            where = await ready(process)
            async with grpc.aio.insecure_channel(where["admin"]) as admin_channel:
                admin = admin_pb2_grpc.AdminStub(admin_channel)
                request = admin_pb2.AddWorkerRequest(stage="decode", address=spare.address)
                assert (await admin.AddWorker(request)).added
                ids = await ids_of(where["grpc"], 2)
                children = child_pids(process.pid)
                assert len(children) == 2
                for i in range(4):
                    async with grpc.aio.insecure_channel(where["grpc"], options=OWN_CONNECTION) as channel:
                        await collect(router_pb2_grpc.RouterStub(channel).Generate(chat("hello", str(i)), timeout=20))
                text = await http_get(where["http"], "/metrics")
                assert 'triptych:router_requests_total{outcome="ok"} 4.0' in text
                os.kill(children[0], signal.SIGKILL)
                while len(await ids_of(where["grpc"], 2) - ids) != 1:
                    pass
                # The new one learned what the admin call had added.
                response = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10)
                assert [row.process for row in response.workers if row.address == spare.address] == [0, 1]
            process.terminate()
            assert await process.wait() == 0
        await spare.stop()


async def test_processes_end_with_their_starter_and_refuse_a_bad_start_once() -> None:
    async with stages() as stubs:
        args = ("--port", "0", "--http-port", "0", "--processes", "2")
        async with program(*args, *addresses(stubs)) as process:
            await ready(process)
            children = child_pids(process.pid)
            process.kill()
            await process.wait()
            await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), timeout_s=60)
        async with program(*args, "--decode-policy", "best", *addresses(stubs)) as process:
            _, err = await process.communicate()
            assert process.returncode == 2
            assert err.decode().splitlines()[-1].startswith("error: --decode-policy='best'")


OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def ids_of(address: str, num: int) -> set[str]:
    """Instance ids behind a port, once there are `num` of them."""
    ids: set[str] = set()
    while len(ids) < num:
        async with grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel:
            try:
                info = await router_pb2_grpc.RouterStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest())
            except grpc.aio.AioRpcError:
                info = common_pb2.ServerInfo()  # the connection was to the one that was killed
        if info.model:  # it is ready
            ids.add(info.instance_id)
        await asyncio.sleep(0.01)
    return ids


async def http_get(address: str, path: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"http://{address}{path}") as response:
        assert response.status == 200
        return await response.text()


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
