"""Protobuf on the wire <-> the values of `core.types`.

`*_from_proto` checks everything that a peer could have got wrong and raises InvalidRequestError, which names the field
and the limit; what it returns is trusted from there on. `*_to_proto` trusts its argument. Pure functions, any thread.

On the wire temperature and top_p are 32-bit floats: a value that such a float cannot hold comes back rounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from core.errors import InvalidRequestError
from core.keys import KEY_LENGTH
from core.types import IMAGE, Feature, FinishReason, KVHandle, PlacedFeature, SamplingParams, Span, Usage
from core.vision_grid import PatchGrid, SquareGrid, VisionGrid
from protos import common_pb2

MAX_TEMPERATURE = 2.0
MAX_STOP_TOKEN_IDS = 64
#: More than any image that passes the encoder's limits can have; keeps sums of them far from any overflow.
MAX_EMBEDS = 1 << 20
MAX_WIDTH = 1 << 20
MAX_GRID = 1 << 20
MAX_IMAGE_PIXELS = 1 << 40
MAX_HANDLE_PARAMS_BYTES = 1 << 20
MAX_NAME_LENGTH = 256
MAX_PRIORITY = 100
MAX_SOURCE_LENGTH = 1024  # connectors.ec.base.MAX_SOURCE_CHARS
MAX_REQUEST_ID_LENGTH = 128

_KEY = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")
_REQUEST_ID = re.compile(rf"[!-~]{{0,{MAX_REQUEST_ID_LENGTH}}}")

_FINISH_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO: dict[int, FinishReason] = {int(number): reason for reason, number in _FINISH_TO_PROTO.items()}


# ---- names ----


def request_id_from_proto(text: str, *, name: str = "request_id") -> str:
    """A caller's name for a request, fit for a log line: at most 128 printable ASCII characters, no spaces. May be
    empty."""
    if not _REQUEST_ID.fullmatch(text):
        raise InvalidRequestError(f"{name} is not at most {MAX_REQUEST_ID_LENGTH} printable ASCII characters")
    return text


def priority_from_proto(priority: int, *, name: str = "priority") -> int:
    """Smaller runs earlier. The range is small so that a scheduler may keep a list for each."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(f"{name}={priority} is not within -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return priority


def tenant_from_proto(text: str, *, name: str = "tenant") -> str:
    """The salt of item keys; any text of at most 256 characters, empty where tenants are not told apart."""
    if len(text) > MAX_NAME_LENGTH:
        raise InvalidRequestError(f"{name} has {len(text)} characters, more than {MAX_NAME_LENGTH}")
    return text


# ---- sampling ----

# Fields that are understood and not supported, and the value that asks for nothing.
_NEUTRAL: dict[str, float] = {
    "min_p": 0.0,
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def sampling_from_proto(message: common_pb2.SamplingParams, *, name: str = "sampling") -> SamplingParams:
    """Check and convert. Absent fields take the defaults that the proto's comments state; `seed` and `max_tokens` stay
    None for the router and the engine to choose. `name` is what errors call the message."""
    for field, neutral in _NEUTRAL.items():
        if message.HasField(field) and getattr(message, field) != neutral:
            raise InvalidRequestError(
                f"{name}.{field}={_shown(getattr(message, field))} is not supported, only {neutral:g}"
            )
    if message.stop:
        raise InvalidRequestError(f"{name}.stop is not supported; {name}.stop_token_ids is")
    if message.HasField("logprobs"):
        raise InvalidRequestError(f"{name}.logprobs is not supported")

    temperature = message.temperature if message.HasField("temperature") else 1.0
    if not (math.isfinite(temperature) and 0.0 <= temperature <= MAX_TEMPERATURE):
        raise InvalidRequestError(f"{name}.temperature={_shown(temperature)} is not within 0 to {MAX_TEMPERATURE:g}")
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not (math.isfinite(top_p) and 0.0 < top_p <= 1.0):
        raise InvalidRequestError(f"{name}.top_p={_shown(top_p)} is not above 0 and at most 1")
    top_k = message.top_k if message.HasField("top_k") else 0
    if top_k < -1:
        raise InvalidRequestError(f"{name}.top_k={top_k} is below -1; 0 and -1 mean all")
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequestError(f"{name}.max_tokens=0 is below 1")
    min_tokens = message.min_tokens if message.HasField("min_tokens") else 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequestError(f"{name}.min_tokens={min_tokens} is above {name}.max_tokens={max_tokens}")
    if len(message.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"{name}.stop_token_ids has {len(message.stop_token_ids)} entries, more than {MAX_STOP_TOKEN_IDS}"
        )
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
    )


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field set, but for a seed and a max_tokens that are None."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        skip_special_tokens=params.skip_special_tokens,
    )


# ---- features ----


def feature_from_proto(message: common_pb2.Feature, *, name: str = "feature") -> Feature:
    """Check and convert one feature."""
    if not _KEY.fullmatch(message.key):
        raise InvalidRequestError(f"{name}.key is not {KEY_LENGTH} lower-case hexadecimal digits")
    if message.modality != IMAGE:
        raise InvalidRequestError(f"{name}.modality={_shown(message.modality)} is not {IMAGE!r}")
    if not 1 <= message.num_embeds <= MAX_EMBEDS:
        raise InvalidRequestError(f"{name}.num_embeds={message.num_embeds} is not within 1 to {MAX_EMBEDS}")
    if len(message.grid) != 3:
        raise InvalidRequestError(f"{name}.grid has {len(message.grid)} numbers, not 3")
    time, height, width = message.grid
    for number in (time, height, width):
        if not 1 <= number <= MAX_GRID:
            raise InvalidRequestError(f"{name}.grid holds {number}, which is not within 1 to {MAX_GRID}")
    if not 1 <= message.width <= MAX_WIDTH:
        raise InvalidRequestError(f"{name}.width={message.width} is not within 1 to {MAX_WIDTH}")
    return Feature(
        key=message.key,
        num_embeds=message.num_embeds,
        grid=(time, height, width),
        width=message.width,
        modality=message.modality,
        source=_source(message.source, name),
    )


def _source(source: str, name: str) -> str:
    if len(source) > MAX_SOURCE_LENGTH or not (source.isascii() and source.isprintable()):
        raise InvalidRequestError(f"{name}.source is not a text of at most {MAX_SOURCE_LENGTH} printable characters")
    return source


def feature_to_proto(feature: Feature) -> common_pb2.Feature:
    return common_pb2.Feature(
        key=feature.key,
        modality=feature.modality,
        num_embeds=feature.num_embeds,
        grid=feature.grid,
        width=feature.width,
        source=feature.source,
    )


def features_from_proto(messages: Iterable[common_pb2.Feature], *, name: str = "features") -> list[Feature]:
    """Check and convert, in order."""
    return [feature_from_proto(message, name=f"{name}[{i}]") for i, message in enumerate(messages)]


def placed_from_proto(messages: Sequence[common_pb2.PlacedFeature], *, name: str = "features") -> list[PlacedFeature]:
    """Check and convert the features of an expanded prompt: in order of place, none inside another."""
    placed: list[PlacedFeature] = []
    end = 0
    for i, message in enumerate(messages):
        one = PlacedFeature(feature_from_proto(message.feature, name=f"{name}[{i}].feature"), message.offset)
        if one.offset < end:
            raise InvalidRequestError(f"{name}[{i}].offset={one.offset} is inside the feature before it, up to {end}")
        end = one.end
        placed.append(one)
    return placed


def placed_to_proto(placed: Iterable[PlacedFeature]) -> list[common_pb2.PlacedFeature]:
    return [common_pb2.PlacedFeature(feature=feature_to_proto(one.feature), offset=one.offset) for one in placed]


# ---- hand-over, timelines, ends ----


def kv_handle_from_proto(message: common_pb2.KvHandle, *, name: str = "kv") -> KVHandle:
    """Check sizes and convert; what `params` holds is the connector's to check."""
    if not 1 <= len(message.connector) <= MAX_NAME_LENGTH:
        raise InvalidRequestError(
            f"{name}.connector has {len(message.connector)} characters, not 1 to {MAX_NAME_LENGTH}"
        )
    if len(message.params) > MAX_HANDLE_PARAMS_BYTES:
        raise InvalidRequestError(f"{name}.params has {len(message.params)} bytes, more than {MAX_HANDLE_PARAMS_BYTES}")
    if message.num_tokens < 1:
        raise InvalidRequestError(f"{name}.num_tokens=0 is below 1")
    return KVHandle(connector=message.connector, params=message.params, num_tokens=message.num_tokens)


def kv_handle_to_proto(handle: KVHandle) -> common_pb2.KvHandle:
    return common_pb2.KvHandle(connector=handle.connector, params=handle.params, num_tokens=handle.num_tokens)


def spans_from_proto(messages: Iterable[common_pb2.Span]) -> list[Span]:
    return [Span(m.name, m.start_s, m.end_s, m.where, m.note) for m in messages]


def spans_to_proto(spans: Iterable[Span]) -> list[common_pb2.Span]:
    return [common_pb2.Span(name=s.name, start_s=s.start_s, end_s=s.end_s, where=s.where, note=s.note) for s in spans]


def usage_from_proto(message: common_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens, message.image_tokens)


def usage_to_proto(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        image_tokens=usage.image_tokens,
    )


def finish_reason_from_proto(number: int) -> FinishReason | None:
    """None for UNSPECIFIED: the request has not ended. Raises InvalidRequestError for a number of a later version."""
    if number == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    reason = _FINISH_FROM_PROTO.get(number)
    if reason is None:
        raise InvalidRequestError(f"finish_reason={number} is unknown to this version")
    return reason


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason:
    return _FINISH_TO_PROTO[reason] if reason is not None else common_pb2.FINISH_REASON_UNSPECIFIED


# ---- load ----


class StatsLike(Protocol):
    """The part of `engine.protocol.EngineStats` that GetLoad shows."""

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_held: int
    kv_leases: int
    encoder_cache_bytes_total: int
    encoder_cache_bytes_held: int
    encoder_cache_items: int
    counters: dict[str, int]


def load_to_proto(stats: StatsLike) -> common_pb2.Load:
    counters: Mapping[str, int] = stats.counters
    return common_pb2.Load(
        num_requests_running=stats.num_running,
        num_requests_waiting=stats.num_waiting,
        kv_blocks_total=stats.kv_blocks_total,
        kv_blocks_held=stats.kv_blocks_held,
        kv_leases=stats.kv_leases,
        encoder_cache_bytes_total=stats.encoder_cache_bytes_total,
        encoder_cache_bytes_held=stats.encoder_cache_bytes_held,
        encoder_cache_items=stats.encoder_cache_items,
        counters=counters,
    )


# ---- vision rule ----


def vision_rule_to_proto(grid: VisionGrid) -> common_pb2.VisionRule:
    match grid:
        case PatchGrid():
            return common_pb2.VisionRule(
                family=grid.family,
                patch_size=grid.patch_size,
                merge_size=grid.merge_size,
                min_pixels=grid.min_pixels,
                max_pixels=grid.max_pixels,
            )
        case SquareGrid():
            return common_pb2.VisionRule(family=grid.family, num_embeds=grid.num_embeds)
    raise TypeError(f"{type(grid).__name__} has no form on the wire")


def vision_rule_from_proto(message: common_pb2.VisionRule, *, name: str = "vision_rule") -> VisionGrid:
    """A rule that predicts embeddings; it knows nothing of the processor's other settings."""
    if 0 < message.num_embeds <= MAX_EMBEDS:
        return SquareGrid(family=message.family, processor="", settings={}, side=1, num_embeds=message.num_embeds)
    unit, limit = message.patch_size * message.merge_size, MAX_IMAGE_PIXELS
    if not (message.num_embeds == 0 < unit <= MAX_GRID and 0 < message.min_pixels <= message.max_pixels <= limit):
        raise InvalidRequestError(f"{name} is none: {_shown(str(message))}")
    return PatchGrid(
        family=message.family,
        processor="",
        settings={},
        patch_size=message.patch_size,
        merge_size=message.merge_size,
        min_pixels=message.min_pixels,
        max_pixels=message.max_pixels,
    )


# ---- unknown fields ----


def reject_unknown_fields(message: Message) -> None:
    """Raise InvalidRequestError where the message, or one inside it, carries a field that this version does not know.

    protobuf keeps such fields in silence, and a request that asked for more than it gets would succeed.
    """
    _reject_unknown(message, message.DESCRIPTOR.name)


def _reject_unknown(message: Message, path: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequestError(f"{path} has a field that is unknown here: number {unknown[0].field_number}")
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        where = f"{path}.{descriptor.name}"
        if isinstance(value, Message):
            _reject_unknown(value, where)
        else:
            for i, one in enumerate(value):
                _reject_unknown(one, f"{where}[{i}]")


def _shown(value: Any) -> str:
    """A client's value for an error message, short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
