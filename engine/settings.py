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
    long_prefill_token_threshold: int = 512  # most tokens of one prompt in a step that others decode in; 0: no limit
    max_num_partial_prefills: int = 2  # prompts that may be computed in part at a time
    aging_s: float = 10.0  # a request that waits so long moves up by one priority

    @property
    def max_parked(self) -> int:
        """Requests that may wait for items or blocks with their turn behind them. Each costs a look a step."""
        return 4 * self.max_num_seqs
