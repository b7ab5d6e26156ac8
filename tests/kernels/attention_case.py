"""Random batches over a paged cache: blocks in any order, NaN wherever nothing was written, wild block ids beyond."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

#: Largest error against float64, relative to the largest value that goes in: rounding of the result and, in the two
#: short types, of the weights (2 ** -9 and 2 ** -11 each).
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
_NUM_LAYERS = 2


@dataclass(frozen=True)
class AttentionCase:
    """A batch: per sequence, how many tokens lie in the cache already and how many are new."""

    sequences: tuple[tuple[int, int], ...]  # (cached, new)
    block_size: int = 4
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    seed: int = 0
    #: Added to the scores of each sequence's first and last key, and in between along a line.
    ramp: tuple[float, float] = (0.0, 0.0)

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def bound(self) -> float:
        """Of `error`. A score is rounded in float32, and so is its weight by as much: the larger, the more."""
        return BOUNDS[self.dtype] + 2.0**-22 * max(map(abs, self.ramp))


@dataclass(frozen=True)
class AttentionInputs:
    """What the kernels take."""

    query: torch.Tensor
    layer_cache: torch.Tensor
    block_table: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    cache_scales: torch.Tensor | None

    def in_float64(self) -> AttentionInputs:
        """The same values for the twin. The cache of an fp8 case stays: the twin reads it exactly."""
        cache = self.layer_cache if self.cache_scales is not None else self.layer_cache.double()
        return AttentionInputs(
            self.query.double(), cache, self.block_table, self.query_starts, self.seq_lens, self.cache_scales
        )


def make_inputs(case: AttentionCase, *, window: int = 0) -> AttentionInputs:
    """With a window, what lies before the window of a sequence's first new token is gone: its rows are NaN and its
    whole blocks have ids that are in no cache."""
    random = torch.Generator().manual_seed(case.seed)
    counts = [-(-(cached + new) // case.block_size) for cached, new in case.sequences]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=random).tolist()
    table = torch.full((len(counts), max(counts, default=0) + 1), 2**30, dtype=torch.int32)
    shape = (num_blocks, _NUM_LAYERS, 2, case.block_size, case.num_kv_heads, case.head_dim)
    cache_dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
    whole = torch.full(shape, torch.nan).to(cache_dtype)
    cache = whole[:, 1]  # a layer is a strided view of the block-major cache
    for i, ((cached, new), count) in enumerate(zip(case.sequences, counts, strict=True)):
        gone = max(0, cached - window + 1) if window else 0
        for j in range(gone // case.block_size, count):
            table[i, j] = order.pop()
        for position in range(gone, cached + new):
            row = torch.randn(2, case.num_kv_heads, case.head_dim, generator=random)
            if any(case.ramp):
                low, high = case.ramp
                row[0, :, 0] = low + (high - low) * position / max(1, cached + new - 1)
            block = int(table[i, position // case.block_size])
            # fp8 has no indexing assignment of its own on a CPU.
            cache[block, :, position % case.block_size].copy_(row.to(cache_dtype))
    starts = torch.tensor([0, *(new for _, new in case.sequences)]).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]), case.num_kv_heads * case.group, case.head_dim, generator=random)
    if any(case.ramp):
        query[:, :, 0] = 1 / case.scale
    scales = torch.rand(2, case.num_kv_heads, generator=random) + 0.5 if case.fp8 else None
    seq_lens = torch.tensor([cached + new for cached, new in case.sequences], dtype=torch.int32)
    return AttentionInputs(query.to(case.dtype), cache, table, starts, seq_lens, scales)


def error(made: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value or 1; NaN where `made` has one."""
    if not made.numel():
        return 0.0
    return float((made.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
