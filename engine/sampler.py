"""Chooses the next token of every row of a batch.

Greedy rows take the highest logit. Sampling rows go through temperature, top-k and top-p in that order, as transformers'
warpers and vLLM do, and then draw by the exponential race: the token with the highest `probability / noise` wins, where
the noise is exponential (Efraimidis and Spirakis, 2006; the Gumbel-max trick in another form).

The noise is a pure function of (seed, index of the output token, token id): a SplitMix64 hash (Steele, Lea and Flood,
2014), not the state of a generator. So a row's token depends on nothing else in the batch, is the same on every device,
and another worker that takes over a request continues the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.types import SamplingParams

#: Below it a temperature divides logits into infinities; such rows are greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5

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
        forbid: token ids that the row must not get now, because of `min_tokens`. Ids outside the vocabulary are ignored.
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
                f"rows differ: {len(params)} params, {len(output_indices)} indices, {len(seeds)} seeds, {len(forbid)} forbid"
            )
        self.num_rows = len(params)
        self._forbidden = [(row, token_id) for row, ids in enumerate(forbid) for token_id in ids]
        self._random_rows = [row for row, p in enumerate(params) if p.temperature >= MIN_TEMPERATURE]
        chosen = [params[row] for row in self._random_rows]
        self._temperatures = [p.temperature for p in chosen]
        self._top_k = [p.top_k for p in chosen]
        self._top_p = [p.top_p for p in chosen]
        self._keys = [_key(seeds[row], output_indices[row]) for row in self._random_rows]

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
        if self._random_rows:
            rows = torch.tensor(self._random_rows, dtype=torch.int64, device=logits.device)
            tokens = tokens.index_copy(0, rows, self._draw(logits[rows].float()))
        return [int(token) for token in tokens.tolist()]

    def _draw(self, logits: Tensor) -> Tensor:
        """Random tokens [num_random_rows] for float32 logits [num_random_rows, vocab] of the sampling rows."""
        device = logits.device
        vocab = logits.shape[1]
        keys = torch.tensor(self._keys, dtype=torch.int64, device=device)[:, None]
        temperatures = torch.tensor(self._temperatures, dtype=torch.float32, device=device)[:, None]
        # The maximum goes to 0 first, so that a small temperature cannot overflow.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
        if not any(0 < k < vocab for k in self._top_k) and all(p >= 1.0 for p in self._top_p):
            ids = torch.arange(vocab, device=device)[None, :]
            return _race(scaled.softmax(dim=-1), keys, ids)

        # In a stable order equal logits are ranked by id, so "the first k" is exact and top_k=1 is greedy, always.
        scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(vocab, device=device)[None, :]
        top_k = torch.tensor([k if 0 < k < vocab else vocab for k in self._top_k], device=device)[:, None]
        probabilities = scaled.masked_fill(rank >= top_k, float("-inf")).softmax(dim=-1)
        # A token stays while the tokens before it hold less than top_p together; so the first one always stays.
        before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
        top_p = torch.tensor(self._top_p, dtype=torch.float64, device=device)[:, None]
        outside = (before >= top_p) & (top_p < 1.0) & (rank > 0)
        probabilities = probabilities.masked_fill(outside, 0.0)
        return _race(probabilities, keys, ids)


def sample(
    logits: Tensor,
    params: list[SamplingParams],
    output_indices: list[int],
    seeds: list[int],
    forbid: list[Sequence[int]],
) -> list[int]:
    """`SamplingBatch(params, output_indices, seeds, forbid).sample(logits)`."""
    return SamplingBatch(params, output_indices, seeds, forbid).sample(logits)


def _race(probabilities: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Winners of the exponential race, as token ids [num_rows].

    `probabilities` [num_rows, n] need not sum to 1; `keys` [num_rows, 1]; `ids` [num_rows or 1, n] are the tokens that
    the columns stand for.
    """
    bits = _mix((ids + 1) * _signed(_GOLDEN) + keys)
    uniform = ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53  # in (0, 1)
    # The upper end rounds to 1 in one case of 2**53; the clamp keeps that one from dividing by zero.
    noise = uniform.log_().neg_().clamp_(min=2.0**-54)
    winners = (probabilities.double() / noise).argmax(dim=-1, keepdim=True)
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
    """SplitMix64's finalizer for int64 tensors: products wrap, and `>>` needs its copies of the sign bit masked off."""
    value = (value ^ (value >> 30 & (1 << 34) - 1)) * _signed(_MIX_1)
    value = (value ^ (value >> 27 & (1 << 37) - 1)) * _signed(_MIX_2)
    return value ^ (value >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    """The 64-bit pattern of an unsigned number as the signed number that torch's int64 holds."""
    return value - (1 << 64) if value >> 63 else value
