from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("request_id", "image", "content_hash", "tenant", "reported_missing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REPORTED_MISSING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    image: bytes
    content_hash: bytes
    tenant: str
    reported_missing: bool
    def __init__(self, request_id: _Optional[str] = ..., image: _Optional[bytes] = ..., content_hash: _Optional[bytes] = ..., tenant: _Optional[str] = ..., reported_missing: _Optional[bool] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("feature", "cached", "spans")
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    feature: _common_pb2.Feature
    cached: bool
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    def __init__(self, feature: _Optional[_Union[_common_pb2.Feature, _Mapping]] = ..., cached: _Optional[bool] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ...) -> None: ...
