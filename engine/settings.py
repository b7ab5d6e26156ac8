"""What the scheduler is told: the engine's configuration after the model is known and memory has been sized."""

from __future__ import annotations

from core.struct import Struct


class SchedulerSettings(Struct, frozen=True):
    """Limits of one engine, all resolved."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    where: str  # the name that timelines show
    kv_load_failure_policy: str = "recompute"
    item_patience_s: float = 0.02  # how long a new request waits for its items before a part of it is computed
