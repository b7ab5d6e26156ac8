"""Which row of M-RoPE's positions each rotary frequency goes by: a vector `[num_frequencies]` int64, on the CPU.

Rows are time, height and width. *Blocked* (Qwen2-VL, Qwen2.5-VL) gives the first frequencies to time, the next to
height, the rest to width; *interleaved* (Qwen3-VL) deals them out in turn and leaves the rest to time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def blocked_axes(sections: Sequence[int]) -> torch.Tensor:
    """The first `sections[0]` frequencies go by row 0, the next `sections[1]` by row 1, and so on."""
    return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(list(sections)))


def interleaved_axes(sections: Sequence[int], num_frequencies: int) -> torch.Tensor:
    """Frequency 3 i + r goes by row r (1 or 2) for i below `sections[r]`, every other by row 0."""
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    for row in (1, 2):
        axes[row : 3 * sections[row] : 3] = row
    return axes
