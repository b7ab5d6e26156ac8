"""Multi-dimensional rotary positions (M-RoPE) of the Qwen-VL families.

Text counts up in all three rows (time, height, width) alike. An image at position p takes time p, height p + y and
width p + x over its merged grid, and the text behind it goes on at p + max(height, width). Source: Qwen2-VL (arXiv
2409.12191), section 2.1, and `get_rope_index` in transformers, whose numbers these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from core.types import PlacedFeature


def mrope_positions(
    num_tokens: int, features: Sequence[PlacedFeature], merge_size: int
) -> tuple[NDArray[np.int64], int]:
    """`[3, num_tokens]` and the offset that later tokens add to their index."""
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done = 0  # tokens placed
    current = 0  # the next position
    for placed in features:
        text = placed.offset - done
        positions[:, done : placed.offset] = np.arange(current, current + text)
        current += text
        frames, rows, columns = placed.feature.grid
        rows, columns = rows // merge_size, columns // merge_size
        image = positions[:, placed.offset : placed.end].reshape(3, frames, rows, columns)
        image[0] = current + np.arange(frames)[:, None, None]
        image[1] = current + np.arange(rows)[None, :, None]
        image[2] = current + np.arange(columns)[None, None, :]
        positions[:, placed.offset : placed.end] = image.reshape(3, -1)
        current += max(rows, columns)
        done = placed.end
    positions[:, done:] = np.arange(current, current + num_tokens - done)
    highest = int(positions.max()) if num_tokens else -1
    return positions, highest + 1 - num_tokens
