"""The vocabulary that all of Triptych shares: frozen values, no behaviour, no torch.

`Struct(array_like=True)` structs (msgspec's) cross process boundaries as arrays, so fields are only ever appended.
"""

from __future__ import annotations

import enum

from core.struct import Struct

#: Name of the only modality so far; part of every item key.
IMAGE = "image"


class Stage(enum.StrEnum):
    """A deployable."""

    ROUTER = "router"
    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"


class ECRole(enum.StrEnum):
    """What an instance does with the encoder cache. Producers hold vision weights, consumers language weights."""

    PRODUCER = "ec_producer"
    CONSUMER = "ec_consumer"
    BOTH = "ec_both"

    @property
    def produces(self) -> bool:
        return self is not ECRole.CONSUMER

    @property
    def consumes(self) -> bool:
        return self is not ECRole.PRODUCER


class KVRole(enum.StrEnum):
    """What an instance does with KV blocks of others."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"

    @property
    def produces(self) -> bool:
        return self is not KVRole.CONSUMER

    @property
    def consumes(self) -> bool:
        return self is not KVRole.PRODUCER


class FinishReason(enum.StrEnum):
    """Why a generation ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(Struct, array_like=True, frozen=True):
    """How to choose tokens. Checked by `core.convert.sampling_from_proto`; the engine trusts it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None
    max_tokens: int | None = None  # None: what max_model_len leaves
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Feature(Struct, array_like=True, frozen=True):
    """An image as every stage but the encoder sees it."""

    key: str  # 64 hexadecimal digits
    num_embeds: int
    grid: tuple[int, int, int]  # patches: time, height, width
    width: int  # hidden size * (1 + deepstack levels)
    modality: str = IMAGE
    source: str = ""  # the encoder's connector on where the item can be had; read by the consumer's connector alone


class PlacedFeature(Struct, array_like=True, frozen=True):
    """A feature whose placeholder tokens stand at [offset, offset + num_embeds) of the expanded prompt."""

    feature: Feature
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.feature.num_embeds


class Span(Struct, array_like=True, frozen=True):
    """One stretch of a request's life, in seconds since the Unix epoch."""

    name: str
    start_s: float
    end_s: float
    where: str = ""
    note: str = ""


class Usage(Struct, array_like=True, frozen=True):
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0


class KVHandle(Struct, array_like=True, frozen=True):
    """Where pinned KV blocks lie. `params` belongs to the connector named and is opaque to everyone else."""

    connector: str
    params: bytes
    num_tokens: int
