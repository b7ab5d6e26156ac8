"""The in-process client: an EngineCore on the caller's own thread, stepped by hand."""

from __future__ import annotations

import threading

from core.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import EngineCoreOutput, EngineCoreRequest, EngineInfo, EngineStats

#: How long a step waits for the step that runs, or for background work where there is nothing to compute.
_IDLE_S = 0.005


class InprocClient:
    """Same calls as the multiprocess clients, without a process. One thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._awake = threading.Event()
        self.core = EngineCore(config, self._awake.set)

    @property
    def info(self) -> EngineInfo:
        return self.core.info

    def add(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def abort(self, request_id: str) -> None:
        self.core.abort(request_id)

    def release(self, request_id: str) -> None:
        self.core.release(request_id)

    def stats(self) -> EngineStats:
        return self.core.scheduler.make_stats()

    def step(self) -> list[EngineCoreOutput]:
        """What EngineCore.step does; waits a moment first where that is nothing yet."""
        wait_s = self.core.wait_s()
        if wait_s != 0.0:
            self._awake.wait(_IDLE_S if wait_s is None else min(wait_s, _IDLE_S))
        self._awake.clear()
        return self.core.step()

    def close(self) -> None:
        self.core.close()
