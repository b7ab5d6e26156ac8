"""Chooses the next token of every row of a batch.

Greedy rows take the highest logit. Sampling rows go through temperature, top-k and top-p in that order, as in
transformers and vLLM, and then draw by the exponential race: the token with the highest `probability / noise` wins,
where the noise is exponential (Efraimidis and Spirakis, 2006; the Gumbel-max trick in another form). One difference:
top-k keeps k tokens exactly and top-p a prefix of the same order, the lowest ids first among equal logits, where
transformers keeps every tie of the k-th.

The noise is a pure function of (seed, index of the output token, token id): a SplitMix64 hash (Steele, Lea and Flood,
2014), not the state of a generator. So a row's token depends on nothing else in the batch, is the same on every device,
and another worker that takes over a request continues the same stream.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.types import SamplingParams

#: Below it a temperature divides logits into infinities; such rows are greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5

#: Up to it a top-k is found by selection; beyond it by sorting.
MAX_FIRST = 1024

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class SamplingBatch:
    """How to choose one token for each row of a logits tensor. Made for one step, on any thread, and used once.

    Args:
        params: one a row.
        output_indices: how many tokens the row's request has generated already, here or elsewhere.
        seeds: one a row, used by sampling rows alone.
        forbid: token ids that the row must not get now, because of `min_tokens`. Ids past the vocabulary are ignored.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        seeds: Sequence[int],
        forbid: Sequence[Sequence[int]],
    ) -> None:
        if not len(params) == len(output_indices) == len(seeds) == len(forbid):
            raise ValueError(
                f"rows differ: {len(params)} params, {len(output_indices)} indices, {len(seeds)} seeds, "
                f"{len(forbid)} forbid"
            )
        self.num_rows = len(params)
        self._forbidden = [(row, token_id) for row, ids in enumerate(forbid) for token_id in ids]
        # A row's group follows from its own parameters, so that other rows do not change how it is computed.
        groups: dict[_Order, list[int]] = {}
        for row, p in enumerate(params):
            if p.temperature >= MIN_TEMPERATURE:
                groups.setdefault(_Order.of(p), []).append(row)
        self._groups = [
            _RandomRows(
                order, rows, [params[row] for row in rows], [_key(seeds[row], output_indices[row]) for row in rows]
            )
            for order, rows in groups.items()
        ]

    def sample(self, logits: Tensor) -> list[int]:
        """Token ids, one a row of `logits` [num_rows, vocab] (any float dtype, any device), which is left as it is.

        Synchronises with the device once.
        """
        if logits.shape[0] != self.num_rows:
            raise ValueError(f"{logits.shape[0]} rows of logits for {self.num_rows} rows of parameters")
        if self._forbidden:
            vocab = logits.shape[1]
            pairs = [pair for pair in self._forbidden if 0 <= pair[1] < vocab]
            rows, ids = torch.tensor(pairs, dtype=torch.int64, device=logits.device).view(-1, 2).unbind(1)
            logits = logits.index_put((rows, ids), logits.new_tensor(float("-inf")))
        # Half precision widens to float32 without changing the order, so there is no need to widen for a maximum. Of
        # equal logits the lowest id is taken.
        tokens = logits.argmax(dim=-1)  # [num_rows]
        for group in self._groups:
            rows = torch.tensor(group.rows, dtype=torch.int64, device=logits.device)
            tokens = tokens.index_copy(0, rows, group.draw(logits[rows].float()))
        return [int(token) for token in tokens.tolist()]


class _Order(enum.Enum):
    """Which tokens of a sampling row must be ranked before it can draw."""

    NONE = enum.auto()  # neither top-k nor top-p
    FIRST = enum.auto()  # a small top-k: the best few, found without sorting the vocabulary
    ALL = enum.auto()

    @classmethod
    def of(cls, params: SamplingParams) -> _Order:
        if 0 < params.top_k <= MAX_FIRST:
            return cls.FIRST
        return cls.NONE if params.top_k <= 0 and params.top_p >= 1.0 else cls.ALL


@dataclass(frozen=True, slots=True)
class _RandomRows:
    """Sampling rows of one batch that are ranked in the same way."""

    order: _Order
    rows: list[int]
    params: list[SamplingParams]
    keys: list[int]

    def draw(self, logits: Tensor) -> Tensor:
        """Random tokens [num_rows] for these rows' logits [num_rows, vocab], float32."""
        device = logits.device
        vocab = logits.shape[1]
        keys = torch.tensor(self.keys, dtype=torch.int64, device=device)[:, None]
        temperatures = torch.tensor([p.temperature for p in self.params], dtype=torch.float32, device=device)[:, None]
        # The maximum goes to 0 first, so that a small temperature cannot overflow.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
        if self.order is _Order.NONE:
            ids = torch.arange(vocab, device=device)[None, :]
            return _race(scaled.softmax(dim=-1, dtype=torch.float64), keys, ids)

        top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in self.params]
        # Equal logits are ranked by id, so "the first k" is exact and top_k=1 is greedy, always.
        if self.order is _Order.FIRST:
            ids = _first(scaled, max(top_k))
            scaled = scaled.gather(1, ids)
        else:
            scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ids.shape[1], device=device)[None, :]
        beyond_k = rank >= torch.tensor(top_k, device=device)[:, None]
        probabilities = scaled.masked_fill(beyond_k, float("-inf")).softmax(dim=-1, dtype=torch.float64)
        # A token stays while the tokens before it hold less than top_p together; so the first one always stays.
        before = probabilities.cumsum(dim=-1) - probabilities
        top_p = torch.tensor([p.top_p for p in self.params], dtype=torch.float64, device=device)[:, None]
        beyond_p = (before >= top_p) & (top_p < 1.0) & (rank > 0)
        return _race(probabilities.masked_fill(beyond_p, 0.0), keys, ids)


def sample(
    logits: Tensor,
    params: list[SamplingParams],
    output_indices: list[int],
    seeds: list[int],
    forbid: list[Sequence[int]],
) -> list[int]:
    """`SamplingBatch(params, output_indices, seeds, forbid).sample(logits)`."""
    return SamplingBatch(params, output_indices, seeds, forbid).sample(logits)


def _first(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` highest scores of each row [num_rows, count], the best first, equal ones by rising id.

    `torch.topk` takes equal values in any order, so it gets numbers that are all different: the float's place among
    floats in the upper half of an int64, and the id, counted from above, in the lower.
    """
    bits = (scores + 0.0).view(torch.int32).long()  # the sum makes one zero of two
    place = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(scores.shape[1], device=scores.device)[None, :]
    highest = ((place << 32) + (0xFFFFFFFF - ids)).topk(count, dim=-1).values
    return 0xFFFFFFFF - (highest & 0xFFFFFFFF)


def _race(probabilities: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Winners of the exponential race, as token ids [num_rows].

    `probabilities` [num_rows, n], float64, need not sum to 1; `keys` [num_rows, 1]; `ids` [num_rows or 1, n] are the
    tokens that the columns stand for.
    """
    bits = _mix((ids + 1) * _signed(_GOLDEN) + keys)
    uniform = _shifted(bits, 11).double().add_(0.5).mul_(2.0**-53)  # in (0, 1)
    # The upper end rounds to 1 in one case of 2**53; the clamp keeps that one from dividing by zero.
    noise = uniform.log_().neg_().clamp_(min=2.0**-54)
    winners = (probabilities / noise).argmax(dim=-1, keepdim=True)
    return ids.expand(keys.shape[0], -1).gather(1, winners).squeeze(1)


def _key(seed: int, output_index: int) -> int:
    """Where the noise of one token of one request begins, as a signed 64-bit number."""
    return _signed(_mix_int(_mix_int(seed & _MASK64) + output_index))


def _mix_int(value: int) -> int:
    """SplitMix64's step for an unsigned 64-bit number."""
    value = (value + _GOLDEN) & _MASK64
    value = (value ^ value >> 30) * _MIX_1 & _MASK64
    value = (value ^ value >> 27) * _MIX_2 & _MASK64
    return value ^ value >> 31


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finalizer for an int64 tensor, in place. Products wrap around."""
    value.bitwise_xor_(_shifted(value, 30)).mul_(_signed(_MIX_1))
    value.bitwise_xor_(_shifted(value, 27)).mul_(_signed(_MIX_2))
    return value.bitwise_xor_(_shifted(value, 31))


def _shifted(value: Tensor, count: int) -> Tensor:
    """`value` shifted right as an unsigned number: int64's own shift fills in copies of the sign bit."""
    return (value >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """The 64-bit pattern of an unsigned number as the signed number that torch's int64 holds."""
    return value - (1 << 64) if value >> 63 else value
