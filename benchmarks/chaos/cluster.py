"""A local cluster whose router reaches its workers through relays."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import urllib.request
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.chaos.relay import Loop, Relay
from cli.cluster import HOST, STAGES, LocalCluster
from cli.process import Child
from protos import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    decode_pb2_grpc,
    encoder_pb2_grpc,
    prefill_pb2_grpc,
    router_pb2_grpc,
)

_STUBS: dict[str, Any] = {
    "encoder": encoder_pb2_grpc.EncoderStub,
    "prefill": prefill_pb2_grpc.PrefillStub,
    "decode": decode_pb2_grpc.DecodeStub,
    "router": router_pb2_grpc.RouterStub,
}
_TIMEOUT_S = 5.0


class ChaosCluster(LocalCluster):
    """As its base. `relays[stage][i]` stands between the router and worker i of a stage; `left_behind` is what its
    processes left in their temporary folder, once it was stopped."""

    relays: dict[str, list[Relay]]
    left_behind: list[str]

    def start(self, timeout_s: float | None = None, *, give_up: threading.Event | None = None) -> ChaosCluster:
        self._temporary = tempfile.mkdtemp(prefix="triptych-chaos-")
        super().start(timeout_s, give_up=give_up)
        return self

    def stop(self, timeout_s: float | None = None) -> None:
        try:
            super().stop(timeout_s)
        finally:
            if hasattr(self, "_loop"):
                for relay in (relay for those in self.relays.values() for relay in those):
                    relay.close_port()
                self._loop.close()
                del self._loop
            if os.path.isdir(self._temporary):
                self.left_behind = os.listdir(self._temporary)
                shutil.rmtree(self._temporary, ignore_errors=True)

    def _child(self, name: str, module: str, args: list[str]) -> Child:
        child = super()._child(name, module, args)
        child.env["TMPDIR"] = self._temporary
        return child

    def _make_router(self) -> Child:
        self._loop = Loop()
        self.relays = {stage: [Relay(self._loop, worker.grpc) for worker in self.workers[stage]] for stage in STAGES}
        lists = [f"--{stage}={','.join(relay.address for relay in self.relays[stage])}" for stage in STAGES]
        return self._child("router", "router", [f"--host={HOST}", "--admin-port=0", *lists, *self._router_args])

    def leave(self, stage: str, index: int) -> None:
        """Tell the router to send a worker no new calls. Raises grpc.RpcError."""
        request = admin_pb2.RemoveWorkerRequest(stage=stage, address=self.relays[stage][index].address)
        with grpc.insecure_channel(self.router_process.addresses["admin"]) as channel:
            admin_pb2_grpc.AdminStub(channel).RemoveWorker(request, timeout=_TIMEOUT_S)

    def join(self, stage: str, index: int) -> None:
        """Tell the router of a worker. Raises grpc.RpcError."""
        request = admin_pb2.AddWorkerRequest(stage=stage, address=self.relays[stage][index].address)
        with grpc.insecure_channel(self.router_process.addresses["admin"]) as channel:
            admin_pb2_grpc.AdminStub(channel).AddWorker(request, timeout=_TIMEOUT_S)

    def load(self, stage: str, index: int) -> common_pb2.Load:
        """What a worker, or the router, holds. Raises grpc.RpcError."""
        address = self.router if stage == "router" else self.workers[stage][index].grpc
        with grpc.insecure_channel(address) as channel:
            made = _STUBS[stage](channel).GetLoad(common_pb2.GetLoadRequest(), timeout=_TIMEOUT_S)
        assert isinstance(made, common_pb2.Load)
        return made

    def engine_pid(self, stage: str, index: int) -> int:
        """The process that holds a worker's tensors. Raises grpc.RpcError."""
        with grpc.insecure_channel(self.workers[stage][index].grpc) as channel:
            info = _STUBS[stage](channel).GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S)
        return int(info.engine_pid)

    def serves(self, stage: str, index: int) -> bool:
        """Whether a worker's health says so, through its relay."""
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(self.relays[stage][index].address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    def routers_count(self) -> dict[str, int]:
        """How many workers of each stage the router counts on, as its metrics say."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=_TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        counts = {}
        for line in lines:
            if line.startswith("triptych:router_workers{") and 'state="serving"' in line:
                labels, value = line.split(" ")
                counts[labels.split('stage="')[1].split('"')[0]] = int(float(value))
        return counts
