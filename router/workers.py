"""The workers of one stage: their channels, what they say of themselves, and what this router has under way there."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from core.server import CHANNEL_OPTIONS
from core.types import Stage
from protos import common_pb2, decode_pb2_grpc, encoder_pb2_grpc, prefill_pb2_grpc
from router.assignment import Assignment
from router.breaker import Breaker
from router.policies.base import Policy

_STUBS: dict[Stage, Any] = {
    Stage.ENCODER: encoder_pb2_grpc.EncoderStub,
    Stage.PREFILL: prefill_pb2_grpc.PrefillStub,
    Stage.DECODE: decode_pb2_grpc.DecodeStub,
}


class Worker:
    """One worker process, as far as this router knows. Slotted state; event loop only.

    `router.probes` writes what the worker says, `Fleet` what becomes of calls; policies see it as a `Candidate`.
    """

    __slots__ = (
        "_channel", "_idle", "address", "assignments", "breaker", "busy_until_s", "calls", "cost", "health",
        "healthy", "info", "instance_id", "kv_capacity", "kv_tokens", "leaving", "load", "other_calls",
        "other_kv_tokens", "reachable", "refusal", "responsive", "serving", "stage", "stub", "waiting",
    )  # fmt: skip

    def __init__(self, stage: Stage, address: str) -> None:
        self.stage = stage
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = _STUBS[stage](self._channel)
        self.health = health_pb2_grpc.HealthStub(self._channel)

        self.info: common_pb2.ServerInfo | None = None  # of the process that answered last
        self.instance_id = ""
        self.healthy = False  # what its health said last
        self.reachable = False  # whether it said anything
        self.responsive = True  # it answers polls in time
        self.serving = False  # all of that
        self.refusal: str | None = None  # why it is never used, as it does not fit
        self.leaving = False  # it gets no new calls
        self.breaker = Breaker()
        self.busy_until_s = 0.0  # it said RESOURCE_EXHAUSTED: others first, on the loop's clock

        self.assignments: set[Assignment] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.calls = 0
        self.cost = 0.0
        self.kv_tokens = 0
        self.load: common_pb2.Load | None = None
        self.other_calls = 0
        self.waiting = 0
        self.other_kv_tokens = 0
        self.kv_capacity = 0

    @property
    def label(self) -> str:
        return f"{self.stage} {self.address}"

    @property
    def fits(self) -> bool:
        """Whether it may be tried at all."""
        return self.refusal is None and not self.leaving

    @property
    def state(self) -> str:
        """One word or two for people."""
        if self.leaving:
            return "leaving"
        if self.refusal is not None:
            return "refused"
        if not self.reachable:
            return "unreachable"
        if not self.responsive:
            return "silent"
        if not self.serving:
            return "not serving"
        return "serving" if self.breaker.closed else "failing"

    def usable(self, now_s: float) -> bool:
        """Whether a policy may choose it."""
        return self.serving and self.refusal is None and not self.leaving and self.breaker.allows(now_s)

    def report(self, load: common_pb2.Load) -> None:
        """Take what GetLoad answered. Of what it names, all that is not ours is other routers'."""
        block_size = self.info.kv_block_size if self.info is not None else 0
        self.load = load
        self.waiting = load.num_requests_waiting
        self.other_calls = max(0, load.num_requests_running + load.num_requests_waiting - self.calls)
        self.kv_capacity = load.kv_blocks_total * block_size
        self.other_kv_tokens = max(0, load.kv_blocks_held * block_size - self.kv_tokens)

    def take(self, assignment: Assignment) -> None:
        self.assignments.add(assignment)
        self._idle.clear()
        self.calls += 1
        self.cost += assignment.charge
        self.kv_tokens += assignment.work.kv_tokens

    def give_back(self, assignment: Assignment) -> None:
        self.assignments.discard(assignment)
        self.calls -= 1
        self.cost = self.cost - assignment.charge if self.calls else 0.0  # no rest from rounding
        self.kv_tokens -= assignment.work.kv_tokens
        if not self.calls:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return once no call of ours is under way there."""
        await self._idle.wait()

    def lose_calls(self) -> None:
        """Tell whoever waits for this worker that it will not answer."""
        for assignment in list(self.assignments):
            assignment.lose()

    async def close(self) -> None:
        await self._channel.close()


class WorkerPool:
    """All workers of one stage, in the order in which they came, and the policy that picks among them."""

    def __init__(self, stage: Stage, policy: Policy) -> None:
        self.stage = stage
        self.policy = policy
        self.workers: list[Worker] = []

    @property
    def serving(self) -> list[Worker]:
        """Those that serve and fit, their breakers aside."""
        return [worker for worker in self.workers if worker.serving and worker.fits]

    def find(self, address: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.address == address), None)
