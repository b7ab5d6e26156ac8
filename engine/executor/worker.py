"""Worker: one device's part of an engine. Weights, caches, the model runner, the connectors' worker sides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from connectors.ec.base import ECConnectorConfig, ECSide, never
from connectors.ec.fallback import make_with_fallback
from connectors.factory import make_kv_connector
from connectors.kv.base import KVConnectorConfig, KVSide
from core.config import EngineConfig
from core.errors import ConfigError
from core.types import KVRole
from engine.executor.base import Handshakes, WorkerReport, WorkerSpec
from engine.memory import CacheSizes, available_bytes
from engine.model_runner import ModelRunner
from engine.models.adapter import ModelAdapter
from engine.models.registry import open_model
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Worker:
    """Every method on one thread, in the order of an executor's calls. `notify` may be called from any thread."""

    def __init__(self, spec: WorkerSpec, notify: Callable[[], None]) -> None:
        config = spec.config
        self._spec = spec
        self._notify = notify
        self._device = pick_device(config.device)
        self._adapter = open_model(Path(config.model), config.dtype)
        self.runner = ModelRunner(
            self._adapter,
            self._device,
            vision=config.ec_role.produces,
            language=config.ec_role.consumes,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            block_size=config.block_size,
            notify=notify,
            enforce_eager=config.enforce_eager,
        )

    def load_model(self) -> WorkerReport:
        report = self.runner.load_weights(Path(self._spec.config.model))
        available = available_bytes(self._device, self._spec.config.gpu_memory_utilization, self._profile())
        return WorkerReport(str(self._device), report.loaded_bytes, report.skipped_bytes, available)

    def initialize_caches(self, sizes: CacheSizes) -> Handshakes:
        """Make the caches, and the connectors that get them."""
        config = self._spec.config
        kv_config = kv_connector_config(self._spec, self._notify)
        kv = None
        if config.kv_connector is not None and kv_config is not None:
            kv = make_kv_connector(config.kv_connector, kv_config, KVSide.WORKER)
        self.runner.allocate(sizes, kv)
        ec_config = ec_connector_config(self._spec, self._adapter, self._notify, self.runner.crowding)
        ec = make_with_fallback(config.ec_connector, config.ec_fallback, ec_config, ECSide.WORKER)
        self.runner.attach(ec, kv)
        return Handshakes(ec.handshake(), None if kv is None else kv.handshake())

    def execute_model(self, out: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute_model(out)

    def close(self) -> None:
        """Stop every thread. Idempotent."""
        self.runner.close()

    def _profile(self) -> int:
        """Bytes that the largest step takes besides weights and caches."""
        device = self._device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            self.runner.profile()
            peak = torch.cuda.max_memory_allocated(device) - before
            torch.cuda.empty_cache()
            return peak
        # The step's memory goes back to the allocator, which keeps most of it: what is free afterwards is after it.
        self.runner.profile()
        return 0


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", name, "this machine has no usable GPU")
    return torch.device(name)


def ec_connector_config(
    spec: WorkerSpec, adapter: ModelAdapter, notify: Callable[[], None], is_crowded: Callable[[], bool] = never
) -> ECConnectorConfig:
    """What both sides of the EC connector are told."""
    return ECConnectorConfig(
        role=spec.config.ec_role,
        namespace=spec.namespace,
        dtype=adapter.dtype,
        width=adapter.embed_width,
        extra=spec.config.ec_connector.extra,
        notify=notify,
        is_crowded=is_crowded,
    )


def kv_connector_config(spec: WorkerSpec, notify: Callable[[], None]) -> KVConnectorConfig | None:
    """What both sides of the KV connector are told; None where there is none, or no language model."""
    config: EngineConfig = spec.config
    if config.kv_connector is None or not config.ec_role.consumes:
        return None
    return KVConnectorConfig(
        role=config.kv_role or KVRole.BOTH,
        layout=spec.layout,
        instance=spec.instance,
        extra=config.kv_connector.extra,
        notify=notify,
    )
