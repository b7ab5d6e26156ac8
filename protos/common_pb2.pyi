from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class TextPart(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ImagePart(_message.Message):
    __slots__ = ("data", "url")
    DATA_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    url: str
    def __init__(self, data: _Optional[bytes] = ..., url: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: TextPart
    image: ImagePart
    def __init__(self, text: _Optional[_Union[TextPart, _Mapping]] = ..., image: _Optional[_Union[ImagePart, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: _containers.RepeatedCompositeFieldContainer[ContentPart]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids", "images")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    images: _containers.RepeatedCompositeFieldContainer[ImagePart]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., images: _Optional[_Iterable[_Union[ImagePart, _Mapping]]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "skip_special_tokens", "min_p", "stop", "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    min_p: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., min_p: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., n: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logprobs: _Optional[int] = ...) -> None: ...

class Feature(_message.Message):
    __slots__ = ("key", "modality", "num_embeds", "grid", "width", "source")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    NUM_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    key: str
    modality: str
    num_embeds: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    width: int
    source: str
    def __init__(self, key: _Optional[str] = ..., modality: _Optional[str] = ..., num_embeds: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class PlacedFeature(_message.Message):
    __slots__ = ("feature", "offset")
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    feature: Feature
    offset: int
    def __init__(self, feature: _Optional[_Union[Feature, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class KvHandle(_message.Message):
    __slots__ = ("connector", "params", "num_tokens", "tenant")
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    connector: str
    params: bytes
    num_tokens: int
    tenant: str
    def __init__(self, connector: _Optional[str] = ..., params: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "start_s", "end_s", "where", "note")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_s: float
    end_s: float
    where: str
    note: str
    def __init__(self, name: _Optional[str] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ..., where: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class MissingItems(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "image_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    image_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., image_tokens: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "stage", "instance_id", "model", "family", "namespace_digest", "dtype", "max_model_len", "embed_width", "ec_role", "kv_role", "ec_connector", "kv_connector", "kv_layout", "weights_loaded_bytes", "weights_skipped_bytes", "max_images_per_prompt", "engine_pid", "vision_rule", "kv_block_size")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EMBED_WIDTH_FIELD_NUMBER: _ClassVar[int]
    EC_ROLE_FIELD_NUMBER: _ClassVar[int]
    KV_ROLE_FIELD_NUMBER: _ClassVar[int]
    EC_CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    KV_CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SKIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    VISION_RULE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    version: str
    stage: str
    instance_id: str
    model: str
    family: str
    namespace_digest: str
    dtype: str
    max_model_len: int
    embed_width: int
    ec_role: str
    kv_role: str
    ec_connector: str
    kv_connector: str
    kv_layout: str
    weights_loaded_bytes: int
    weights_skipped_bytes: int
    max_images_per_prompt: int
    engine_pid: int
    vision_rule: VisionRule
    kv_block_size: int
    def __init__(self, version: _Optional[str] = ..., stage: _Optional[str] = ..., instance_id: _Optional[str] = ..., model: _Optional[str] = ..., family: _Optional[str] = ..., namespace_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., embed_width: _Optional[int] = ..., ec_role: _Optional[str] = ..., kv_role: _Optional[str] = ..., ec_connector: _Optional[str] = ..., kv_connector: _Optional[str] = ..., kv_layout: _Optional[str] = ..., weights_loaded_bytes: _Optional[int] = ..., weights_skipped_bytes: _Optional[int] = ..., max_images_per_prompt: _Optional[int] = ..., engine_pid: _Optional[int] = ..., vision_rule: _Optional[_Union[VisionRule, _Mapping]] = ..., kv_block_size: _Optional[int] = ...) -> None: ...

class VisionRule(_message.Message):
    __slots__ = ("family", "num_embeds", "patch_size", "merge_size", "min_pixels", "max_pixels")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    NUM_EMBEDS_FIELD_NUMBER: _ClassVar[int]
    PATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MERGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    family: str
    num_embeds: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    def __init__(self, family: _Optional[str] = ..., num_embeds: _Optional[int] = ..., patch_size: _Optional[int] = ..., merge_size: _Optional[int] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_requests_running", "num_requests_waiting", "kv_blocks_total", "kv_blocks_held", "kv_leases", "encoder_cache_bytes_total", "encoder_cache_bytes_held", "encoder_cache_items", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    KV_LEASES_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHE_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHE_BYTES_HELD_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHE_ITEMS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    num_requests_running: int
    num_requests_waiting: int
    kv_blocks_total: int
    kv_blocks_held: int
    kv_leases: int
    encoder_cache_bytes_total: int
    encoder_cache_bytes_held: int
    encoder_cache_items: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_held: _Optional[int] = ..., kv_leases: _Optional[int] = ..., encoder_cache_bytes_total: _Optional[int] = ..., encoder_cache_bytes_held: _Optional[int] = ..., encoder_cache_items: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
