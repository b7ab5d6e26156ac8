"""A request as the scheduler holds it: the engine's only mutable view of one piece of work."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from core.types import FinishReason, KVHandle, PlacedFeature, SamplingParams, Span
from engine.protocol import EngineCoreRequest, ErrorKind


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything from FINISHED_STOPPED on is the end."""

    WAITING = enum.auto()
    WAITING_FOR_FSM = enum.auto()
    WAITING_FOR_ENCODER_CACHE = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED


@dataclass(slots=True, eq=False)
class Request:
    """A generation. Owned by the scheduler, touched on the step thread only."""

    request_id: str
    arrival_s: float  # wall clock, for spans; `added_s` and `aged_s` are monotonic
    prompt_token_ids: list[int]
    features: list[PlacedFeature]
    sampling: SamplingParams
    stop_ids: frozenset[int]  # any of them ends the answer
    max_total_tokens: int  # prompt and output together
    output_token_ids: list[int]
    hand_over: bool
    kv: KVHandle | None
    items_end: int = 0  # where the last image's placeholders end
    tenant: str = ""
    priority: int = 0  # smaller is earlier
    added_s: float = 0.0
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0  # in the cache once the steps that were scheduled have run
    num_executed_tokens: int = 0  # in the cache now
    num_pending: int = 0  # tokens that steps under way will sample
    preemptions: int = 0  # tells the steps before the last preemption from those after it
    num_given_tokens: int = 0  # output tokens that another engine made
    block_ids: list[int] = field(default_factory=list)
    held_items: set[str] = field(default_factory=set)  # keys of encoder-cache items it keeps in the buffer
    aborted: bool = False  # waits only for a pull to let go of its blocks
    recomputes: bool = False  # lost KV that it had, or should have had
    num_cached_tokens: int = 0  # of the first run's tokens, those whose KV was there already
    pulled: bool = False  # its KV came from another engine
    # What KVCacheManager knows: names of the full blocks so far, and how many of them others can find.
    root_hash: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    num_known_blocks: int = 0
    # What RequestQueue knows.
    queue_tag: tuple[float, int] | None = None
    level: int = 0
    aged_s: float = 0.0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    parked_s: float = 0.0

    @classmethod
    def from_core(cls, made: EngineCoreRequest, max_model_len: int) -> Request:
        sampling = made.sampling or SamplingParams()
        room = max_model_len - len(made.prompt_token_ids)
        wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        return cls(
            request_id=made.request_id,
            arrival_s=made.arrival_s,
            prompt_token_ids=made.prompt_token_ids,
            features=made.features,
            sampling=sampling,
            stop_ids=frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else made.eos_token_ids))),
            max_total_tokens=len(made.prompt_token_ids) + wanted,
            output_token_ids=list(made.output_token_ids),
            num_given_tokens=len(made.output_token_ids),
            hand_over=made.hand_over,
            kv=made.kv,
            items_end=made.features[-1].end if made.features else 0,
            tenant=made.tenant,
            priority=made.priority,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far; every one but the last must be computed before the next can be sampled."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def image_tokens(self) -> int:
        return sum(placed.feature.num_embeds for placed in self.features)


@dataclass(slots=True)
class Ended:
    """How a request ended, on its way to an EngineCoreOutput."""

    status: RequestStatus
    reason: FinishReason | None = None
    kv: KVHandle | None = None
    missing: list[str] = field(default_factory=list)
    error_kind: ErrorKind | None = None
    error: str = ""
