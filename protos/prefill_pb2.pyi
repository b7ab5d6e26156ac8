from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "chat", "tokens", "expanded", "features", "sampling", "tenant", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPANDED_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chat: _common_pb2.ChatPrompt
    tokens: _common_pb2.TokenPrompt
    expanded: ExpandedPrompt
    features: _containers.RepeatedCompositeFieldContainer[_common_pb2.Feature]
    sampling: _common_pb2.SamplingParams
    tenant: str
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., chat: _Optional[_Union[_common_pb2.ChatPrompt, _Mapping]] = ..., tokens: _Optional[_Union[_common_pb2.TokenPrompt, _Mapping]] = ..., expanded: _Optional[_Union[ExpandedPrompt, _Mapping]] = ..., features: _Optional[_Iterable[_Union[_common_pb2.Feature, _Mapping]]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class ExpandedPrompt(_message.Message):
    __slots__ = ("prompt_token_ids", "features", "output_token_ids")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    features: _containers.RepeatedCompositeFieldContainer[_common_pb2.PlacedFeature]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., features: _Optional[_Iterable[_Union[_common_pb2.PlacedFeature, _Mapping]]] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("prefilled", "missing", "spans")
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    prefilled: Prefilled
    missing: _common_pb2.MissingItems
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    def __init__(self, prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., missing: _Optional[_Union[_common_pb2.MissingItems, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("prompt_token_ids", "features", "token_id", "text", "finish_reason", "kv", "usage")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    features: _containers.RepeatedCompositeFieldContainer[_common_pb2.PlacedFeature]
    token_id: int
    text: str
    finish_reason: _common_pb2.FinishReason
    kv: _common_pb2.KvHandle
    usage: _common_pb2.Usage
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., features: _Optional[_Iterable[_Union[_common_pb2.PlacedFeature, _Mapping]]] = ..., token_id: _Optional[int] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., kv: _Optional[_Union[_common_pb2.KvHandle, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id", "kv")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kv: _common_pb2.KvHandle
    def __init__(self, request_id: _Optional[str] = ..., kv: _Optional[_Union[_common_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
