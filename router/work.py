"""What a call will cost the worker that gets it: all that a routing policy may look at besides the workers.

Units are tokens throughout: an image counts its predicted embeddings, a text its predicted tokens. Predictions need not
be right, only comparable between workers.
"""

from __future__ import annotations

import msgspec

from core.types import Stage


class PrefixBlock(msgspec.Struct, frozen=True):
    """A piece of a prompt. Digests are chained: equal digests mean equal prompts up to the end of the block."""

    digest: bytes
    num_tokens: int  # predicted, of this block alone


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One call to one stage. `Fleet.encode_work` and its likes make it."""

    stage: Stage
    cost: int  # tokens to compute where nothing is cached, at least 1
    key: bytes = b""  # encode: equal for equal items, tenant included
    prefix: tuple[PrefixBlock, ...] = ()  # prefill: the prompt from its beginning, images included
    kv_tokens: int = 0  # decode: tokens whose KV it will hold at its end
