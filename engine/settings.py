"""What the scheduler is told: the engine's configuration after the model is known and memory has been sized."""

from __future__ import annotations

import msgspec


class SchedulerSettings(msgspec.Struct, frozen=True):
    """Limits of one engine, all resolved."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    where: str  # the name that timelines show
    kv_load_failure_policy: str = "recompute"
