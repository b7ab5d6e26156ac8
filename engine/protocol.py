"""What crosses between a front process (gRPC, no torch) and its engine process. Fields are only ever appended.

`EngineCoreRequest` goes in, `EngineCoreOutputs` come out; `RequestOutput` is what `AsyncLLM` makes of them for a
servicer. The two structures inside the engine are in `engine/scheduler_output.py`.
"""

from __future__ import annotations

import enum

import msgspec

from core.types import Feature, FinishReason, KVHandle, PlacedFeature, SamplingParams, Span, Usage


class EngineCoreRequest(msgspec.Struct, array_like=True):
    """One piece of work for an engine: a prompt to compute and continue, or (with `image`) one image to encode."""

    request_id: str  # unique in this engine; chosen by the front process
    arrival_s: float  # Unix time
    # -- generation --
    prompt_token_ids: list[int] = []
    features: list[PlacedFeature] = []
    sampling: SamplingParams | None = None
    output_token_ids: list[int] = []  # generated elsewhere already; the engine continues after them
    hand_over: bool = False  # stop after one token and keep the KV blocks for another engine
    kv: KVHandle | None = None  # pull these blocks instead of computing them
    eos_token_ids: list[int] = []  # end the answer unless `ignore_eos`; filled in by AsyncLLM
    # -- encoding --
    image: bytes | None = None
    feature: Feature | None = None  # what the image's header predicts
    reported_missing: bool = False  # a consumer could not load the item: save it again, whatever the store says
    tenant: str = ""  # tenants share no cached KV, and turns fairly
    priority: int = 0  # smaller is earlier


class ErrorKind(enum.StrEnum):
    """Which class of core.errors an engine's error becomes."""

    INVALID_REQUEST = "invalid_request"
    INCOMPATIBLE = "incompatible"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class EngineCoreOutput(msgspec.Struct, array_like=True):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int] = []
    finished: bool = False
    finish_reason: FinishReason | None = None  # None with `finished`: handed over, aborted, missing, failed or encoded
    kv: KVHandle | None = None  # set at hand-over
    missing: list[str] = []  # item keys; the request ended because of them
    encoded_cached: bool = False  # the vision tower did not run for this request
    error_kind: ErrorKind | None = None
    error: str = ""
    spans: list[Span] = []
    usage: Usage | None = None
    item_source: str = ""  # of an image that was encoded: what `Feature.source` is to say
    retry_after_s: float | None = None  # of `OVERLOADED`: when there may be room


class EngineStats(msgspec.Struct, array_like=True):
    """The engine's state after a step. Counters only grow; the rest are gauges."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_held: int = 0
    kv_leases: int = 0
    encoder_cache_bytes_total: int = 0
    encoder_cache_bytes_held: int = 0
    encoder_cache_items: int = 0
    counters: dict[str, int] = {}
    observations: dict[str, list[float]] = {}  # since the last message: histogram name -> values, in seconds
    ec_leases: int = 0  # items that consumers may still pull from this engine's memory

    @property
    def num_leases(self) -> int:
        """What other engines may still come for."""
        return self.kv_leases + self.ec_leases


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """Everything that one step brought, in one message."""

    outputs: list[EngineCoreOutput] = []
    stats: EngineStats | None = None
    fatal: str = ""  # the engine is dead, and why


class EngineInfo(msgspec.Struct, array_like=True):
    """What an engine says of itself once it can serve."""

    pid: int
    family: str
    namespace_digest: str
    dtype: str
    device: str
    max_model_len: int
    embed_width: int
    kv_layout: str = ""
    num_blocks: int = 0
    block_size: int = 0
    encoder_cache_bytes: int = 0
    weights_loaded_bytes: int = 0
    weights_skipped_bytes: int = 0


class RequestOutput(msgspec.Struct):
    """What a servicer streams: the new tokens and their text, never part of a character."""

    request_id: str
    token_ids: list[int]
    text: str
    finished: bool = False
    finish_reason: FinishReason | None = None
    kv: KVHandle | None = None
    missing: list[str] = []
    spans: list[Span] = []
    usage: Usage | None = None


class EncodeOutput(msgspec.Struct):
    """What an encode request ends in."""

    feature: Feature
    cached: bool
    spans: list[Span]
