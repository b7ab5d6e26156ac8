"""Tokens drawn from logits: top-k, top-p and min-p with parameters and seeds of each row, without sorting a vocabulary.

One program a row. Logits become weights, `exp((logit - highest) / temperature)`. What remains is told by a threshold:
a value, and how many of those equal to it, lowest ids first, so that top-k keeps k tokens exactly. The threshold's bits
are found two at a time, from the top: a pass over the row counts the tokens, or adds up the weights, at or above each
of three candidates (radix selection, on the order of float32's bits). The draw among the rest is the exponential race
of `kernels/race.py`, whose noise is a function of (key, token id) alone, in float64 as there: CPU and GPU draw alike.

Rows are read some 36 times with both top-k and top-p, three times without, out of the L2 cache after the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sampling_twin import sample_torch

__all__ = ["sample", "sample_torch"]

_BLOCK = 4096
_GREEDY_BELOW = tl.constexpr(1e-5)
_LOWEST_NOISE = tl.constexpr(2.0**-54)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def scaled_tile(row_ptr, column, vocab, highest, temperature):
    """(logit - highest) / temperature of a tile; -inf beyond the vocabulary."""
    logit = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logit - highest, tl.zeros_like(logit) + temperature) + 0.0  # the sum makes one zero of two


@triton.jit
def place_of(x):
    """A float32's place among all float32, as uint32."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, ~bits, bits | 0x80000000)


@triton.jit
def select(
    row_ptr,
    vocab,
    highest,
    temperature,
    wanted,  # float64: of tokens, or of weight
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest place such that the tokens at or above it amount to `wanted`; 0 if all do not."""
    digit = tl.arange(0, 4)
    found = tl.full([1], 0, tl.uint32)
    for step in range(16):
        candidate = found + (digit.to(tl.uint32) << (30 - 2 * step))  # [4]
        amount = tl.zeros([BLOCK, 4], tl.float32)
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            scaled = scaled_tile(row_ptr, column, vocab, highest, temperature)
            place = place_of(scaled)
            each = (column < vocab).to(tl.float32)
            if BY_WEIGHT:
                each = tl.exp(scaled)
            amount += tl.where(place[:, None] >= candidate[None, :], each[:, None], 0.0)
        enough = (tl.sum(amount.to(tl.float64), axis=0) >= wanted) | (digit == 0)
        best = tl.max(tl.where(enough, digit, 0), axis=0)
        found = found + (best.to(tl.uint32) << (30 - 2 * step))
    return tl.max(found, axis=0)


@triton.jit
def at_and_above(row_ptr, vocab, highest, temperature, place_wanted, BLOCK: tl.constexpr):
    """How many tokens are above a place, and their weight (float64); how many are at it."""
    above = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        scaled = scaled_tile(row_ptr, column, vocab, highest, temperature)
        place = place_of(scaled)
        inside = column < vocab
        above += (inside & (place > place_wanted)).to(tl.int32)
        weight += tl.where(place > place_wanted, tl.exp(scaled), 0.0)
        at += (inside & (place == place_wanted)).to(tl.int32)
    return tl.sum(above, axis=0), tl.sum(weight.to(tl.float64), axis=0), tl.sum(at, axis=0)


@triton.jit
def value_at(place):
    """The float32 at a place."""
    bits = tl.where((place >> 31) == 1, place & 0x7FFFFFFF, ~place)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def race_noise(column, key):
    """-log of a uniform number that depends on key and token id: SplitMix64's finalizer. float64."""
    bits = (column + 1).to(tl.uint64) * tl.full([1], _GOLDEN, tl.uint64) + key.to(tl.uint64, bitcast=True)
    bits = (bits ^ (bits >> 30)) * tl.full([1], _MIX_1, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([1], _MIX_2, tl.uint64)
    bits = bits ^ (bits >> 31)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    return tl.maximum(-tl.log(uniform), _LOWEST_NOISE)


@triton.jit
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    out_ptr,
    stride_logits,
    vocab,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits
    temperature = tl.load(temperature_ptr + row)

    # The highest logit, the lowest id among equal ones.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        best_id = tl.where(logit > best, column, best_id)
        best = tl.maximum(best, logit)
    highest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == highest, best_id, vocab), axis=0)

    if temperature >= _GREEDY_BELOW:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        threshold = tl.full([1], 0, tl.uint32)
        threshold = tl.max(threshold, axis=0)  # a scalar
        at_threshold = vocab  # tokens kept of those at the threshold
        if (top_k > 0) & (top_k < vocab):
            threshold = select(row_ptr, vocab, highest, temperature, top_k.to(tl.float64), False, BLOCK)
            above, _, _ = at_and_above(row_ptr, vocab, highest, temperature, threshold, BLOCK)
            at_threshold = top_k - above
        if top_p < 1.0:
            _, weight, at = at_and_above(row_ptr, vocab, highest, temperature, threshold, BLOCK)
            lowest = tl.exp(value_at(threshold)).to(tl.float64)
            kept = tl.minimum(at_threshold, at)
            total = weight + tl.where(kept > 0, lowest * kept.to(tl.float64), 0.0)
            wanted = tl.maximum(total * top_p, 1e-30)
            # What top-k cut off weighs in too: it stands behind all that is kept, which has enough by itself.
            nucleus = select(row_ptr, vocab, highest, temperature, wanted, True, BLOCK)
            if nucleus >= threshold:  # but for rounding it is
                _, weight, _ = at_and_above(row_ptr, vocab, highest, temperature, nucleus, BLOCK)
                # A token stays while those before it hold less than top_p together.
                each = tl.exp(value_at(nucleus)).to(tl.float64)
                needed = tl.maximum(tl.ceil((wanted - weight) / each), 1.0)
                needed = tl.minimum(needed, vocab.to(tl.float64)).to(tl.int32)
                at_threshold = tl.where(nucleus == threshold, tl.minimum(at_threshold, needed), needed)
                threshold = nucleus

        best_score = tl.full([BLOCK], -1.0, tl.float64)
        best_id = tl.zeros([BLOCK], tl.int32)
        key = tl.load(keys_ptr + row)
        seen = 0  # tokens at the threshold in the tiles before
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            scaled = scaled_tile(row_ptr, column, vocab, highest, temperature)
            place = place_of(scaled)
            at = ((column < vocab) & (place == threshold)).to(tl.int32)
            rank = seen + tl.cumsum(at, axis=0)  # 1 for the first
            seen += tl.sum(at, axis=0)
            keep = (place > threshold) | ((at == 1) & (rank <= at_threshold))
            keep &= (column < vocab) & (tl.exp(scaled) >= min_p)
            score = tl.exp(scaled.to(tl.float64)) / race_noise(column, key)
            score = tl.where(keep, score, -1.0)
            best_id = tl.where(score > best_score, column, best_id)
            best_score = tl.maximum(best_score, score)
        token = tl.min(tl.where(best_score == tl.max(best_score, axis=0), best_id, vocab), axis=0)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Token ids `[num_rows]` int64 for `logits` `[num_rows, vocab]` of any float dtype, rows contiguous in themselves.

    The rest is `[num_rows]`: `temperature` float32, below 1e-5 the row is greedy; `top_k` int32, 0 or at least `vocab`
    for all; `top_p` float64 in (0, 1]; `min_p` float32 in [0, 1], of the highest probability; `keys` int64, where the
    row's noise begins. top-p counts within top-k, min-p is a condition besides; the highest logit always stays.
    """
    num_rows, vocab = logits.shape
    parameters = (temperature, top_k, top_p, min_p, keys)
    if not vocab or logits.stride(1) != 1 or any(each.shape != (num_rows,) for each in parameters):
        raise ValueError(
            f"sample: logits {tuple(logits.shape)} of strides {logits.stride()}, parameters "
            f"{[tuple(each.shape) for each in parameters]}"
        )
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        sample_kernel[(num_rows,)](
            logits, *parameters, out, logits.stride(0), vocab, BLOCK=block, num_warps=min(16, max(1, block // 256))
        )
    return out
