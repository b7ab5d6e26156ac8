"""The workers as the admin call sees and changes them: of this process, or of all processes of a router together."""

from __future__ import annotations

from typing import Protocol

import msgspec

from core.types import Stage
from router.discovery import Discovery
from router.fleet import Fleet


class Row(msgspec.Struct, frozen=True):
    """One worker; see WorkerStatus in protos/admin.proto."""

    stage: str
    address: str
    state: str
    reason: str
    instance_id: str
    sources: list[str]
    calls: int
    process: int


class Workers(Protocol):
    """What the Admin service works on."""

    async def rows(self) -> list[Row]: ...

    async def add(self, stage: Stage, address: str) -> bool:
        """False where the worker was there."""

    async def remove(self, stage: Stage, address: str) -> bool:
        """False where there is no such worker."""


class Roster:
    """The workers of one process. Event loop only."""

    def __init__(self, fleet: Fleet, discovery: Discovery, process: int = 0) -> None:
        self._fleet = fleet
        self._discovery = discovery
        self._process = process

    async def rows(self) -> list[Row]:
        return [
            Row(
                stage=worker.stage.value,
                address=worker.address,
                state=worker.state,
                reason=worker.refusal or "",
                instance_id=worker.info.instance_id if worker.info is not None else "",
                sources=self._discovery.sources(worker),
                calls=worker.calls,
                process=self._process,
            )
            for worker in self._fleet.workers()
        ]

    async def add(self, stage: Stage, address: str) -> bool:
        return self._discovery.add(stage, address)

    async def remove(self, stage: Stage, address: str) -> bool:
        return self._discovery.remove(stage, address)
