"""EngineCore: one model, one scheduler, one runner. `step()` is schedule, execute, update.

The same class serves all three stages; the roles say which weights it loads and which caches it has. It lives in a
process of its own behind a client (`engine/core_process.py`, `engine/client.py`), or in the caller's
(`engine/inproc_client.py`).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from connectors.ec.base import ECConnectorConfig, ECSide
from connectors.factory import make_ec_connector, make_kv_connector
from connectors.kv.base import KVConnectorBase, KVConnectorConfig, KVLayout, KVSide
from core.config import EngineConfig
from core.errors import ConfigError
from core.keys import namespace_digest
from core.types import KVRole
from core.vision_grid import VisionGrid
from engine.encoder_cache_manager import EncoderCacheManager
from engine.kv_cache_manager import KVCacheManager
from engine.memory import CacheNeeds, available_bytes, size_caches
from engine.model_runner import ModelRunner
from engine.models.registry import open_model
from engine.models.weights import weight_files, weights_digest
from engine.protocol import EngineCoreOutput, EngineCoreRequest, EngineInfo, ErrorKind
from engine.scheduler import Scheduler
from engine.settings import SchedulerSettings

logger = logging.getLogger(__name__)

_KV_LAYOUT_VERSION = 1


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", name, "this machine has no usable GPU")
    return torch.device(name)


class EngineCore:
    """Every method on one thread. `notify` is called from any thread when something in the background has ended."""

    def __init__(self, config: EngineConfig, notify: Callable[[], None]) -> None:
        started_s = time.monotonic()
        model_dir = Path(config.model)
        device = pick_device(config.device)
        adapter = open_model(model_dir, config.dtype)
        vision, language = config.ec_role.produces, config.ec_role.consumes
        max_model_len = config.max_model_len or adapter.max_position
        if max_model_len > adapter.max_position:
            raise ConfigError("--max-model-len", max_model_len, f"the model has {adapter.max_position} positions")
        weights = weights_digest(model_dir, weight_files(model_dir))
        dtype = str(adapter.dtype).removeprefix("torch.")
        namespace = namespace_digest(
            weights=weights, preprocessing=VisionGrid.from_model(model_dir).preprocessing_id(), dtype=dtype
        )
        self.runner = ModelRunner(
            adapter,
            device,
            vision=vision,
            language=language,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
            notify=notify,
        )
        report = self.runner.load_weights(model_dir)

        layout = KVLayout(
            version=_KV_LAYOUT_VERSION,
            model=weights,
            dtype=dtype,
            num_layers=adapter.num_layers,
            block_size=config.block_size,
            num_kv_heads=adapter.num_kv_heads,
            head_dim=adapter.head_dim,
        )
        sizes = size_caches(
            CacheNeeds(
                block_bytes=layout.elements_per_block * adapter.dtype.itemsize if language else 0,
                block_size=config.block_size,
                row_bytes=adapter.embed_width * adapter.dtype.itemsize,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                num_gpu_blocks=config.num_gpu_blocks,
                encoder_cache_bytes=config.encoder_cache_bytes,
            ),
            available_bytes(device, config.gpu_memory_utilization, self._profile(device)),
        )
        self.runner.allocate(sizes)

        ec_config = ECConnectorConfig(
            role=config.ec_role,
            namespace=namespace,
            dtype=adapter.dtype,
            width=adapter.embed_width,
            extra=config.ec_connector.extra,
            notify=notify,
        )
        ec_scheduler = make_ec_connector(config.ec_connector, ec_config, ECSide.SCHEDULER)
        ec_worker = make_ec_connector(config.ec_connector, ec_config, ECSide.WORKER)
        kv_scheduler, kv_worker = _make_kv(config, layout, notify) if language else (None, None)
        self.runner.attach(ec_worker, kv_worker)
        ec_scheduler.set_handshake(ec_worker.handshake())
        if kv_scheduler is not None and kv_worker is not None:
            kv_scheduler.set_handshake(kv_worker.handshake())
        self._scheduler_connectors = (ec_scheduler, kv_scheduler)

        self.scheduler = Scheduler(
            SchedulerSettings(
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_waiting=config.max_waiting,
                where=config.where,
                kv_load_failure_policy=config.kv_load_failure_policy,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                max_num_partial_prefills=config.max_num_partial_prefills,
            ),
            KVCacheManager(sizes.num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching),
            EncoderCacheManager(sizes.buffer_rows, adapter.embed_width * adapter.dtype.itemsize),
            ec_scheduler,
            kv_scheduler,
        )
        self.info = EngineInfo(
            pid=os.getpid(),
            family=str(adapter.config.model_type),
            namespace_digest=namespace,
            dtype=dtype,
            device=str(device),
            max_model_len=max_model_len,
            embed_width=adapter.embed_width,
            kv_layout=layout.describe() if language else "",
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            encoder_cache_bytes=sizes.buffer_rows * adapter.embed_width * adapter.dtype.itemsize,
            weights_loaded_bytes=report.loaded_bytes,
            weights_skipped_bytes=report.skipped_bytes,
        )
        logger.info(
            "ready in %.1f s: %s %s on %s, %d KV blocks of %d tokens, encoder buffer of %d rows",
            time.monotonic() - started_s,
            self.info.family,
            dtype,
            device,
            sizes.num_blocks,
            config.block_size,
            sizes.buffer_rows,
        )

    def _profile(self, device: torch.device) -> int:
        """Bytes that the largest step takes besides weights and caches."""
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

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request; one that this engine's role cannot serve ends with an error in the next step."""
        wants_vision = request.image is not None
        if (wants_vision and not self.runner.vision) or (not wants_vision and not self.runner.language):
            stage = "an encoder" if wants_vision else "a language model"
            reason = f"the request needs {stage}, and this worker has none (--ec-role)"
            self.scheduler.refuse(request.request_id, ErrorKind.INCOMPATIBLE, reason)
            return
        if not wants_vision and (reason := self._problem_with(request)):
            self.scheduler.refuse(request.request_id, ErrorKind.INVALID_REQUEST, reason)
            return
        self.scheduler.add_request(request)

    def _problem_with(self, request: EngineCoreRequest) -> str:
        """What would end the engine in the middle of a step, and with it every other request; "" where all is well."""
        num_prompt, num_given = len(request.prompt_token_ids), len(request.output_token_ids)
        if not 0 < num_prompt <= num_prompt + num_given < self.info.max_model_len:
            limit = self.info.max_model_len
            return f"prompt: {num_prompt} tokens and {num_given} generated ones, max_model_len is {limit}"
        vocab_size = self.runner.adapter.vocab_size
        for token_ids in (request.prompt_token_ids, request.output_token_ids):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                return f"prompt: holds a token outside the vocabulary of {vocab_size}"
        end = 0
        for i, placed in enumerate(request.features, start=1):
            if not end <= placed.offset < placed.end <= num_prompt:
                return f"image {i}: has tokens {placed.offset} to {placed.end}, free are {end} to {num_prompt}"
            end = placed.end
        try:
            self.runner.adapter.positions(num_prompt, request.features)
        except ValueError:
            return "images: a grid and its number of embeddings contradict each other"
        return ""

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def release(self, request_id: str) -> None:
        self.scheduler.release(request_id)

    @property
    def has_work(self) -> bool:
        """Whether steps are needed: requests, background work under way, or leases that may end."""
        return self.scheduler.has_work or self.scheduler.kv.num_leases > 0

    def step(self) -> list[EngineCoreOutput]:
        """One step, and what it has to tell. Returns at once where there is nothing to compute."""
        out = self.scheduler.schedule()
        made = self.runner.execute_model(out)
        return self.scheduler.update_from_output(out, made)

    def close(self) -> None:
        """Stop every thread. Idempotent."""
        self.runner.close()
        for connector in self._scheduler_connectors:
            if connector is not None:
                connector.close()


def _make_kv(
    config: EngineConfig, layout: KVLayout, notify: Callable[[], None]
) -> tuple[KVConnectorBase | None, KVConnectorBase | None]:
    if config.kv_connector is None:
        return None, None
    kv_config = KVConnectorConfig(
        role=config.kv_role or KVRole.BOTH,
        layout=layout,
        instance=uuid.uuid4().hex,
        extra=config.kv_connector.extra,
        notify=notify,
    )
    return (
        make_kv_connector(config.kv_connector, kv_config, KVSide.SCHEDULER),
        make_kv_connector(config.kv_connector, kv_config, KVSide.WORKER),
    )
