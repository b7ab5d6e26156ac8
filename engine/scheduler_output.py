"""The two structures inside an engine: what a step is to do, and what it did.

New requests cross in full, running ones as differences, so that a runner in another process keeps its own copy of each
request's state. Fields are only ever appended.
"""

from __future__ import annotations

from connectors.ec.base import BufferSlice, ECConnectorMetadata, ECConnectorOutput
from connectors.kv.base import KVConnectorMetadata, KVConnectorOutput
from core.struct import Struct, field
from core.types import Feature, PlacedFeature, SamplingParams


class NewRequestData(Struct, array_like=True):
    """A request that the runner has not seen, or has forgotten after a preemption."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    features: list[PlacedFeature]
    sampling: SamplingParams
    stop_ids: list[int]  # not to be sampled before `min_tokens`
    block_ids: list[int]
    num_computed_tokens: int


class CachedRequestData(Struct, array_like=True):
    """What changed for requests that the runner knows. The lists run in parallel."""

    request_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


class ItemUse(Struct, array_like=True):
    """A stretch of a request's tokens that takes its embeddings from the encoder buffer."""

    request_id: str
    first_token: int  # index within the request
    num_tokens: int
    first_row: int  # row of the buffer


class ImageToEncode(Struct, array_like=True):
    """A prepared image that goes through the vision tower in this step, into these rows."""

    feature: Feature
    where: BufferSlice


class ImageToPrepare(Struct, array_like=True):
    """An image file to decode and preprocess in the background."""

    feature: Feature
    image: bytes


class SchedulerOutput(Struct, array_like=True):
    """One step's work."""

    new_requests: list[NewRequestData] = field(default_factory=list)
    cached_requests: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # in the order of scheduling
    item_uses: list[ItemUse] = field(default_factory=list)
    prepare: list[ImageToPrepare] = field(default_factory=list)
    forget_prepared: list[str] = field(default_factory=list)  # keys whose image nobody wants any more
    encode: list[ImageToEncode] = field(default_factory=list)
    save: dict[str, BufferSlice] = field(default_factory=dict)  # items that are in the buffer and go to the store
    finished_request_ids: list[str] = field(default_factory=list)
    ec_metadata: ECConnectorMetadata | None = None
    kv_metadata: KVConnectorMetadata | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class ModelRunnerOutput(Struct, array_like=True):
    """What a step brought. `sampled` holds the requests whose last known token was computed: one new token each."""

    sampled: dict[str, int] = field(default_factory=dict)
    prepared: list[str] = field(default_factory=list)
    failed_prepare: dict[str, str] = field(default_factory=dict)  # key -> what is wrong with the image
    encoded: dict[str, str] = field(default_factory=dict)  # key -> "" or what went wrong
    ec: ECConnectorOutput | None = None
    kv: KVConnectorOutput | None = None
