"""The workers of one stage: their channels, what they say of themselves, and in which order they are tried."""

from __future__ import annotations

from typing import Any

import grpc
from blake3 import blake3
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.server import CHANNEL_OPTIONS
from core.types import Stage
from protos import common_pb2, decode_pb2_grpc, encoder_pb2_grpc, prefill_pb2_grpc

_STUBS: dict[Stage, Any] = {
    Stage.ENCODER: encoder_pb2_grpc.EncoderStub,
    Stage.PREFILL: prefill_pb2_grpc.PrefillStub,
    Stage.DECODE: decode_pb2_grpc.DecodeStub,
}


class Worker:
    """One worker process. Slotted state that the fleet's monitor writes and the pipeline reads."""

    __slots__ = ("_channel", "_health", "address", "incompatible", "info", "reachable", "serving", "stage", "stub")

    def __init__(self, stage: Stage, address: str) -> None:
        self.stage = stage
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = _STUBS[stage](self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self.info: common_pb2.ServerInfo | None = None  # of the process that answered last
        self.serving = False  # what its health said last
        self.reachable = False  # whether it said anything
        self.incompatible = False  # it does not fit the other stages: never used

    async def poll(self, timeout_s: float) -> None:
        """Ask for health, and for ServerInfo where the worker serves. Unreachable means not serving; never raises."""
        try:
            health = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            self.reachable = True
            serving = health.status == health_pb2.HealthCheckResponse.SERVING
            if serving:
                self.info = await self.stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=timeout_s)
            self.serving = serving
        except grpc.aio.AioRpcError as error:
            self.serving = False
            self.reachable = error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

    async def close(self) -> None:
        await self._channel.close()


class WorkerPool:
    """All workers of one stage. The list is static; which of them are tried first changes."""

    def __init__(self, stage: Stage, addresses: tuple[str, ...]) -> None:
        self.stage = stage
        self.workers = [Worker(stage, address) for address in addresses]
        self._turn = 0

    @property
    def serving(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.serving and not worker.incompatible]

    def by_turn(self) -> list[Worker]:
        """Every usable worker once, beginning with the next one in turn. The turn goes on from call to call."""
        turn, self._turn = self._turn, self._turn + 1
        # The turn counts among those that serve: were it kept over all of them, the one behind a worker that is down
        # would get that worker's share besides its own.
        first = self.serving
        start = turn % len(first) if first else 0
        return first[start:] + first[:start] + self._last_resort()

    def by_content(self, content_hash: bytes) -> list[Worker]:
        """Every usable worker once, in the order of rendezvous hashing (Thaler and Ravishankar, 1998) on the content.

        Equal images meet at one worker, and when it goes only its share moves, evenly, to the others.
        """
        ranked = sorted(self.serving, key=lambda worker: _weight(content_hash, worker.address), reverse=True)
        return ranked + self._last_resort()

    def _last_resort(self) -> list[Worker]:
        # What health said is a moment old: a worker that seems down is tried when there is no other.
        return [worker for worker in self.workers if not worker.serving and not worker.incompatible]

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()


def _weight(content_hash: bytes, address: str) -> bytes:
    return blake3(content_hash + address.encode()).digest(length=8)
