"""Chooses the next token of every row of a batch.

Greedy rows take the highest logit. Sampling rows go through temperature, top-k and top-p in that order, as in
transformers and vLLM, and then draw by the exponential race: the token with the highest `probability / noise` wins. One
difference: top-k keeps k tokens exactly and top-p a prefix of the same order, the lowest ids first among equal logits,
where transformers keeps every tie of the k-th.

The noise is a pure function of (seed, index of the output token, token id), not the state of a generator
(`kernels/race.py`). So a row's token depends on nothing else in the batch, is the same on every device, and another
worker that takes over a request continues the same stream.

On a GPU one kernel does all of it (`kernels/sampling.py`). On a CPU rows are grouped by what must be ranked, and as
little as possible is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.types import SamplingParams
from kernels.race import race, race_key

#: `kernels.sampling.sample`.
Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

#: Below it a temperature divides logits into infinities; such rows are greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5

#: Up to it a top-k is found by selection; beyond it by sorting.
MAX_FIRST = 1024


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
        self._params = params
        self._keys = [race_key(seed, index) for seed, index in zip(seeds, output_indices, strict=True)]
        # A row's group follows from its own parameters, so that other rows do not change how it is computed.
        groups: dict[_Order, list[int]] = {}
        for row, p in enumerate(params):
            if p.temperature >= MIN_TEMPERATURE:
                groups.setdefault(_Order.of(p), []).append(row)
        self._groups = [
            _RandomRows(order, rows, [params[row] for row in rows], [self._keys[row] for row in rows])
            for order, rows in groups.items()
        ]

    def sample(self, logits: Tensor, draw: Draw | None = None) -> list[int]:
        """Token ids, one a row of `logits` [num_rows, vocab] (any float dtype, any device), which is left as it is.

        With `draw`, that chooses where a row is random, else the operators here. Synchronises with the device once.
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
        if draw is not None and self._groups:
            return [int(token) for token in draw(logits, *self._columns(logits.device)).tolist()]
        for group in self._groups:
            rows = torch.tensor(group.rows, dtype=torch.int64, device=logits.device)
            tokens = tokens.index_copy(0, rows, group.draw(logits[rows].float()))
        return [int(token) for token in tokens.tolist()]

    def _columns(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The parameters as `draw` takes them."""

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return (
            column([p.temperature for p in self._params], torch.float32),
            column([max(0, p.top_k) for p in self._params], torch.int32),
            column([p.top_p for p in self._params], torch.float64),
            column([0.0] * self.num_rows, torch.float32),  # min_p: nobody may ask for it yet
            column(self._keys, torch.int64),
        )


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
            return race(scaled.softmax(dim=-1, dtype=torch.float64), keys, ids)

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
        return race(probabilities.masked_fill(beyond_p, 0.0), keys, ids)


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
