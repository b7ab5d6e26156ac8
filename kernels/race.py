"""The exponential race: how a token is drawn, with noise that is a pure function of (key, token id).

The token with the highest `weight / noise` wins, where the noise is exponential (Efraimidis and Spirakis, 2006; the
Gumbel-max trick in another form). The noise is -log of a uniform number made by SplitMix64 (Steele, Lea and Flood,
2014), not by a generator with a state: a draw depends on nothing else in its batch, and is the same on every device.
"""

from __future__ import annotations

from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def race(weights: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Winners, as token ids `[num_rows]`.

    `weights` `[num_rows, n]`, float64, need not sum to 1; `keys` `[num_rows, 1]` int64; `ids` `[num_rows or 1, n]` are
    the tokens that the columns stand for.
    """
    bits = mix((ids + 1) * _signed(_GOLDEN) + keys)
    uniform = _shifted(bits, 11).double().add_(0.5).mul_(2.0**-53)  # in (0, 1)
    # The upper end rounds to 1 in one case of 2**53; the clamp keeps that one from dividing by zero.
    noise = uniform.log_().neg_().clamp_(min=2.0**-54)
    winners = (weights / noise).argmax(dim=-1, keepdim=True)
    return ids.expand(keys.shape[0], -1).gather(1, winners).squeeze(1)


def race_key(seed: int, output_index: int) -> int:
    """Where the noise of one token of one request begins, as a signed 64-bit number."""
    return _signed(mix_int(mix_int(seed & _MASK64) + output_index))


def mix_int(value: int) -> int:
    """SplitMix64's step for an unsigned 64-bit number."""
    value = (value + _GOLDEN) & _MASK64
    value = (value ^ value >> 30) * _MIX_1 & _MASK64
    value = (value ^ value >> 27) * _MIX_2 & _MASK64
    return value ^ value >> 31


def mix(value: Tensor) -> Tensor:
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
