"""What a peer may send, what is refused, and that nothing is lost on the way there and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import convert
from core.errors import InvalidRequestError
from core.types import Feature, FinishReason, KVHandle, PlacedFeature, SamplingParams, Span, Usage
from engine.protocol import EngineStats
from protos import common_pb2, router_pb2

uint32 = st.integers(0, 2**32 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
keys = st.text("0123456789abcdef", min_size=64, max_size=64)
grid_numbers = st.integers(1, convert.MAX_GRID)
features = st.builds(
    Feature,
    key=keys,
    num_embeds=st.integers(1, 500),
    grid=st.tuples(grid_numbers, grid_numbers, grid_numbers),
    width=st.integers(1, convert.MAX_WIDTH),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.none() | st.integers(1, 2**32 - 1))
    return SamplingParams(
        temperature=draw(st.floats(0, 2, width=32)),
        top_p=draw(st.floats(0, 1, width=32, exclude_min=True)),
        top_k=draw(st.integers(0, 2**31 - 1)),
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens if max_tokens is not None else 2**32 - 1)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(uint32, max_size=convert.MAX_STOP_TOKEN_IDS))),
        skip_special_tokens=draw(st.booleans()),
    )


@st.composite
def placed_features(draw: st.DrawFn) -> list[PlacedFeature]:
    placed = []
    end = 0
    for feature in draw(st.lists(features, max_size=4)):
        placed.append(PlacedFeature(feature, end + draw(st.integers(0, 10))))
        end = placed[-1].end
    return placed


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(sampling_params())
def test_sampling_round_trip(params: SamplingParams) -> None:
    assert convert.sampling_from_proto(over_the_wire(convert.sampling_to_proto(params))) == params


def test_absent_sampling_fields_take_the_defaults_of_the_proto() -> None:
    assert convert.sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()


@given(placed_features())
def test_placed_features_round_trip(placed: list[PlacedFeature]) -> None:
    wire = [over_the_wire(one) for one in convert.placed_to_proto(placed)]
    assert convert.placed_from_proto(wire) == placed


@given(st.text(min_size=1, max_size=256), st.binary(max_size=100), st.integers(1, 2**32 - 1))
def test_handles_round_trip(connector: str, params: bytes, num_tokens: int) -> None:
    handle = KVHandle(connector, params, num_tokens)
    assert convert.kv_handle_from_proto(over_the_wire(convert.kv_handle_to_proto(handle))) == handle


@given(st.lists(st.builds(Span, st.text(), floats, floats, st.text(), st.text()), max_size=4))
def test_spans_round_trip(spans: list[Span]) -> None:
    assert convert.spans_from_proto(map(over_the_wire, convert.spans_to_proto(spans))) == spans


@given(st.builds(Usage, uint32, uint32, uint32, uint32))
def test_usage_round_trip(usage: Usage) -> None:
    assert convert.usage_from_proto(over_the_wire(convert.usage_to_proto(usage))) == usage


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_round_trip(reason: FinishReason | None) -> None:
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason


def test_a_finish_reason_of_a_later_version_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="finish_reason=9"):
        convert.finish_reason_from_proto(9)


NAN, INF = float("nan"), float("inf")
REFUSED = [
    ({"temperature": -0.1}, "sampling.temperature=-0.1.* is not within 0 to 2"),
    ({"temperature": 2.1}, "sampling.temperature"),
    ({"temperature": NAN}, "sampling.temperature=nan"),
    ({"temperature": INF}, "sampling.temperature=inf"),
    ({"top_p": 0.0}, "sampling.top_p=0.0 is not above 0 and at most 1"),
    ({"top_p": 1.01}, "sampling.top_p"),
    ({"top_p": NAN}, "sampling.top_p=nan"),
    ({"top_p": -INF}, "sampling.top_p=-inf"),
    ({"top_k": -2}, "sampling.top_k=-2 is below -1"),
    ({"max_tokens": 0}, "sampling.max_tokens=0 is below 1"),
    ({"max_tokens": 4, "min_tokens": 5}, "sampling.min_tokens=5 is above sampling.max_tokens=4"),
    ({"stop_token_ids": range(65)}, "sampling.stop_token_ids has 65 entries, more than 64"),
    ({"min_p": 0.1}, "sampling.min_p"),
    ({"min_p": NAN}, "sampling.min_p=nan"),
    ({"stop": ["\n"]}, "sampling.stop is not supported"),
    ({"n": 2}, "sampling.n=2 is not supported, only 1"),
    ({"n": 0}, "sampling.n=0"),
    ({"presence_penalty": 0.5}, "sampling.presence_penalty"),
    ({"frequency_penalty": -0.5}, "sampling.frequency_penalty"),
    ({"repetition_penalty": 1.5}, "sampling.repetition_penalty=1.5 is not supported, only 1"),
    ({"logprobs": 0}, "sampling.logprobs is not supported"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(case[0])[:40] for case in REFUSED])
def test_sampling_is_refused_by_name_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        convert.sampling_from_proto(common_pb2.SamplingParams(**fields))


def test_every_sampling_field_is_either_carried_or_refused() -> None:
    """A field added to the proto and forgotten here would be ignored in silence."""
    carried = set(SamplingParams.__struct_fields__)
    refused = {next(iter(fields)) for fields, _ in REFUSED}
    assert {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields} <= carried | refused


def test_neutral_values_of_refused_fields_are_allowed() -> None:
    neutral = common_pb2.SamplingParams(
        min_p=0, n=1, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, top_k=-1
    )
    assert convert.sampling_from_proto(neutral) == SamplingParams()


GOOD_FEATURE: dict[str, Any] = {
    "key": "0a" * 32,
    "modality": "image",
    "num_embeds": 4,
    "grid": [1, 4, 4],
    "width": 8,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "0A" * 32}, "features.0..key is not 64 lower-case hexadecimal"),
        ({"key": "0a" * 31}, "features.0..key"),
        ({"key": "../" + "0" * 61}, "features.0..key"),
        ({"key": "0a" * 32 + "\n"}, "features.0..key"),
        ({"modality": "video"}, "features.0..modality='video' is not 'image'"),
        ({"num_embeds": 0}, "features.0..num_embeds=0"),
        ({"num_embeds": 2**31}, "features.0..num_embeds"),
        ({"grid": [1, 4]}, "features.0..grid has 2 numbers, not 3"),
        ({"grid": [1, 0, 4]}, "features.0..grid holds 0"),
        ({"width": 0}, "features.0..width=0"),
    ],
)
def test_features_are_refused_by_name_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        convert.features_from_proto([common_pb2.Feature(**{**GOOD_FEATURE, **changes})])


def test_features_may_not_overlap() -> None:
    feature = common_pb2.Feature(**GOOD_FEATURE)
    placed = [common_pb2.PlacedFeature(feature=feature, offset=offset) for offset in (0, 3)]
    with pytest.raises(InvalidRequestError, match=r"features\[1\]\.offset=3 is inside"):
        convert.placed_from_proto(placed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"connector": "", "num_tokens": 1}, "kv.connector"),
        ({"connector": "x" * 257, "num_tokens": 1}, "kv.connector"),
        ({"connector": "x", "num_tokens": 0}, "kv.num_tokens"),
        ({"connector": "x", "num_tokens": 1, "params": bytes((1 << 20) + 1)}, "kv.params has 1048577 bytes"),
    ],
)
def test_handles_are_refused_by_name_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        convert.kv_handle_from_proto(common_pb2.KvHandle(**fields))


@pytest.mark.parametrize("text", ["a b", "a\nb", "ü", "x" * 129, "\x1b[31m"])
def test_request_ids_that_would_spoil_a_log_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        convert.request_id_from_proto(text)


@pytest.mark.parametrize("text", ["", "chatcmpl-1", "a/b:c"])
def test_ordinary_request_ids_pass(text: str) -> None:
    assert convert.request_id_from_proto(text) == text


def test_a_tenant_is_bounded() -> None:
    assert convert.tenant_from_proto("Zoë") == "Zoë"
    with pytest.raises(InvalidRequestError, match="tenant has 257 characters"):
        convert.tenant_from_proto("x" * 257)


def test_load_carries_every_field() -> None:
    load = convert.load_to_proto(EngineStats(1, 2, 3, 4, 5, 6, 7, 8, {"ec_hits_total": 9}))
    assert [value for field, value in load.ListFields() if field.name != "counters"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert dict(load.counters) == {"ec_hits_total": 9}


UNKNOWN = b"\xa0\x06\x01"  # field 100, varint 1


def test_known_fields_pass() -> None:
    convert.reject_unknown_fields(full_request())
    convert.reject_unknown_fields(common_pb2.Load(counters={"a": 1}))


@pytest.mark.parametrize(
    ("path", "where"),
    [
        (lambda m: m, "GenerateRequest has a field that is unknown here: number 100"),
        (lambda m: m.sampling, "GenerateRequest.sampling has"),
        (lambda m: m.chat.messages[0].content[1].image, r"GenerateRequest.chat.messages\[0\].content\[1\].image has"),
    ],
)
def test_unknown_fields_are_refused_wherever_they_hide(path: Any, where: str) -> None:
    message = full_request()
    path(message).MergeFromString(UNKNOWN)
    with pytest.raises(InvalidRequestError, match=where):
        convert.reject_unknown_fields(over_the_wire(message))


def full_request() -> router_pb2.GenerateRequest:
    content = [
        common_pb2.ContentPart(text=common_pb2.TextPart(text="x")),
        common_pb2.ContentPart(image=common_pb2.ImagePart(data=b"x")),
    ]
    chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content=content)])
    return router_pb2.GenerateRequest(chat=chat, sampling=common_pb2.SamplingParams(stop_token_ids=[1, 2]))
