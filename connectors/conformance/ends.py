"""How a check ends other than by passing, and payloads to store."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

#: Bytes of the buffer that no load was ordered into.
PAINT = 0xA5
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class FailedError(Exception):
    """The connector did what it must not do. One line."""


class RefusedError(Exception):
    """The connector said at its start that it does not do this."""


def expect(condition: object, what: str) -> None:
    """Raises FailedError(what) unless the condition holds."""
    if not condition:
        raise FailedError(what)


def digest(*words: object) -> str:
    """64 hexadecimal digits that depend on all the words: a key, or a namespace."""
    return hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=32).hexdigest()


def payload(rows: int, width: int, dtype: torch.dtype, *words: object) -> torch.Tensor:
    """`[rows, width]` of `dtype`, the same for the same words. Every bit pattern is fair, NaNs with payloads too: a
    store moves bytes, not numbers."""
    seed = int(digest(*words)[:16], 16)
    raw = np.random.Generator(np.random.SFC64(seed)).bytes(rows * width * dtype.itemsize)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(rows, width)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
