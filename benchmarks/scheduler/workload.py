"""The requests that both schedulers get, and the points at which they are measured."""

from __future__ import annotations

from typing import Protocol

import msgspec

BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 4096
PROMPT_TOKENS = 64
#: The token that every request is made to sample in every step. None stops at it.
SAMPLED = 7
_VOCABULARY = 30_000
#: Where requests come and go, they make so many tokens, another number each: of 256, some end in every step.
_LEAST_TOKENS, _SPREAD = 32, 64
#: Steps before the first that counts: prompts take some, and the first decode steps allocate.
WARM_UP_STEPS = 8
_MAX_PROMPT_STEPS = 64


class Point(msgspec.Struct, frozen=True):
    """`running` requests decode, one token each a step, while `waiting` find no place. With `turnover` a request that
    has ended comes again, last in the queue, so that the queue is drawn from and added to all the time."""

    running: int
    waiting: int
    turnover: bool

    @property
    def case(self) -> str:
        return "come and go" if self.turnover else "all decode"


class Requests(msgspec.Struct, frozen=True):
    """All that a scheduler is given: prompts and how many tokens each makes, in the order of arrival."""

    max_num_seqs: int
    num_blocks: int
    turnover: bool
    prompts: list[list[int]]
    max_tokens: list[int]


class Stepper(Protocol):
    """A scheduler with its requests, the first `max_num_seqs` of them running."""

    def steps(self, count: int) -> list[float]:
        """Seconds that `schedule()` and `update_from_output()` took together, for each of so many steps."""


def requests_of(point: Point, num_steps: int) -> Requests:
    """For a point at which `num_steps` steps will be measured. No prompt begins like another: prefix caching is on and
    finds nothing."""
    total = point.running + point.waiting
    prompts = [[(n * 7919 + i * (1 + n % 13)) % _VOCABULARY for i in range(PROMPT_TOKENS)] for n in range(total)]
    if point.turnover:
        max_tokens = [_LEAST_TOKENS + n * 37 % _SPREAD for n in range(total)]
    else:
        max_tokens = [num_steps + WARM_UP_STEPS + _MAX_PROMPT_STEPS] * total
    # Room for all that run, and not for one more.
    num_blocks = point.running * -(-(PROMPT_TOKENS + max(max_tokens)) // BLOCK_SIZE)
    return Requests(point.running, num_blocks, point.turnover, prompts, max_tokens)
