"""What one engine is told at its start. Built from a service's options, checked once, never changed afterwards."""

from __future__ import annotations

from typing import Any

import msgspec

from core.types import ECRole, KVRole


class ConnectorConfig(msgspec.Struct, frozen=True):
    """Which connector class to load, and the operator's settings for it."""

    name: str
    module_path: str | None = None  # None: one of ours, by name
    extra: dict[str, Any] = {}


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything an EngineCore needs. Crosses the process boundary as JSON."""

    model: str  # a folder with config.json, weights, tokenizer and processor
    ec_role: ECRole
    ec_connector: ConnectorConfig
    ec_fallback: ConnectorConfig | None = None  # where items go that `ec_connector` does not take
    kv_role: KVRole | None = None  # None: the engine keeps its KV to itself
    kv_connector: ConnectorConfig | None = None
    where: str = "engine-0"  # the name that timelines show
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None  # None: what the model's configuration says
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024  # requests beyond it are refused
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 512  # most tokens of one prompt in a step that others decode in; 0: no limit
    max_num_partial_prefills: int = 2
    block_size: int = 16
    num_gpu_blocks: int | None = None  # None: sized by itself
    gpu_memory_utilization: float = 0.9
    encoder_cache_bytes: int | None = None  # None: sized by itself
    max_images_per_prompt: int = 16
    tensor_parallel_size: int = 1
    kv_load_failure_policy: str = "recompute"  # or "fail"
    distributed_executor_backend: str = "uni"  # or "mp": weights, caches and runner in a process of their own
    async_scheduling: bool = False  # schedule a step while the one before it runs
    enforce_eager: bool = False  # no CUDA graphs: each kernel of a decode step is launched by itself
    log_level: str = "INFO"
    log_format: str = "text"  # or "json"
