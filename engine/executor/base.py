"""Executor: what an engine's scheduler sees of the devices that compute its steps.

The interface is made for several workers that compute one step together (tensor parallelism): an order goes to all of
them, sizes fit the one with the least memory, and only one answers with tokens. So far there is one worker; it runs in
the engine's process (`in_process.py`) or in one of its own (`multiprocess.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TypeVar

from connectors.kv.base import KVLayout
from core.config import EngineConfig
from core.errors import EngineError
from core.struct import Struct
from engine.memory import CacheSizes
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput

#: A load reads all weights, perhaps from a slow disk.
START_TIMEOUT_S = 900.0
#: What the connectors' worker sides and a step that is under way have at the end.
STOP_TIMEOUT_S = 5.0

T = TypeVar("T")


class WorkerSpec(Struct, frozen=True):
    """All that a worker is told before it loads. Crosses a process boundary."""

    config: EngineConfig
    max_model_len: int  # resolved
    namespace: str  # of the items that it loads and saves
    layout: KVLayout
    instance: str  # names this engine's life to KV consumers


class WorkerReport(Struct, frozen=True):
    """What a worker says once its weights are loaded and the largest step has been run."""

    device: str
    loaded_bytes: int
    skipped_bytes: int
    available_bytes: int  # what the caches may take


class Handshakes(Struct, frozen=True):
    """What the connectors' scheduler sides must know of their worker sides."""

    ec: str
    kv: str | None  # None: no KV connector


class Executor(ABC):
    """Owns the workers, and they own weights, caches and the connectors' worker sides.

    Every method on one thread, the engine's. The order of calls: `load_model`, `initialize_caches`, then
    `execute_model` and `check_health` as often as wanted, then `shutdown`, which may come at any time.

    Failure: `load_model` and `initialize_caches` raise ConfigError where an option or a file is wrong, else
    EngineError. An exception in a step ends that step's future. A worker that dies ends every pending future at once
    with an EngineError that names it, and `check_health` raises the same from then on. After either the executor is
    of no more use; nothing is tried again.
    """

    @abstractmethod
    def load_model(self) -> WorkerReport:
        """Load the role's weights and run a step of the largest size for its peak memory. Waits."""

    @abstractmethod
    def initialize_caches(self, sizes: CacheSizes) -> Handshakes:
        """Allocate KV cache and encoder buffer, and hand them to the connectors' worker sides. Waits."""

    @abstractmethod
    def execute_model(self, out: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Begin a step. Steps are executed in the order of the calls; the next may be handed in before the last has
        ended. Neither side changes `out` from here on. Callbacks of the future run on any thread."""

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineError where a worker is gone. Costs nothing."""

    @abstractmethod
    def shutdown(self) -> None:
        """End workers and threads, within STOP_TIMEOUT_S even in the middle of a step. Idempotent."""


def wait_for_start(future: Future[T]) -> T:
    """The result of a part of the start. Raises what the part raised, or EngineError after START_TIMEOUT_S."""
    try:
        return future.result(START_TIMEOUT_S)
    except TimeoutError:
        if future.done():
            raise
        raise EngineError(f"a worker did not start within {START_TIMEOUT_S:g} s") from None
