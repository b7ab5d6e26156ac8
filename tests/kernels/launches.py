"""One call of each launcher and each variant of its kernels, at the sizes that models have, for the compile test.

Nothing is computed: the tensors are on the CPU, and only their types, strides and alignment count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.block_copy import gather_blocks, scatter_blocks
from kernels.embedding_scatter import scatter_embeddings
from kernels.kv_write import kv_write
from kernels.norm import add_rms_norm, rms_norm
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.rotary import mrope_angles, norm_rotary, rotary
from kernels.sampling import sample
from kernels.swiglu import swiglu

LAUNCHES: dict[str, Callable[[], object]] = {}
#: More of the same kernels, compiled for one target only: the test's time is short.
VARIANTS: dict[str, Callable[[], object]] = {}

_NUM_LAYERS, _BLOCK_SIZE, _NUM_BLOCKS = 28, 16, 2


def _cache(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (_NUM_BLOCKS, _NUM_LAYERS, 2, _BLOCK_SIZE, num_kv_heads, head_dim)
    return torch.empty(shape, dtype=dtype)[:, 1]


def _decode(
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    fp8: bool = False,
    **options: float,
) -> None:
    paged_decode(
        torch.empty(num_seqs, num_heads, head_dim, dtype=dtype),
        _cache(num_kv_heads, head_dim, torch.float8_e4m3fn if fp8 else dtype),
        torch.empty(num_seqs, 512, dtype=torch.int32),
        torch.empty(num_seqs, dtype=torch.int32),
        head_dim**-0.5,
        cache_scales=torch.empty(2, num_kv_heads) if fp8 else None,
        **options,  # type: ignore[arg-type]
    )


def _prefill(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    fp8: bool = False,
    spans: bool = False,
    **options: float,
) -> None:
    paged_prefill(
        torch.empty(num_tokens, num_heads, head_dim, dtype=dtype),
        _cache(num_kv_heads, head_dim, torch.float8_e4m3fn if fp8 else dtype),
        torch.empty(2, 512, dtype=torch.int32),
        torch.empty(3, dtype=torch.int32),
        torch.empty(2, dtype=torch.int32),
        head_dim**-0.5,
        span_ends=torch.empty(num_tokens, dtype=torch.int32) if spans else None,
        cache_scales=torch.empty(2, num_kv_heads) if fp8 else None,
        **options,  # type: ignore[arg-type]
    )


_BF16 = torch.bfloat16
LAUNCHES["decode of one long sequence, 7 heads a group"] = lambda: _decode(1, 28, 4, 128, _BF16)
VARIANTS["decode of many, head size 80"] = lambda: _decode(128, 32, 32, 80, torch.float16)
LAUNCHES["decode, fp8, head size 256, window and soft cap"] = lambda: _decode(
    32, 8, 4, 256, _BF16, fp8=True, window=1024, soft_cap=50.0
)
VARIANTS["decode, float32"] = lambda: _decode(32, 16, 8, 128, torch.float32)
LAUNCHES["prefill, 7 heads a group"] = lambda: _prefill(4096, 28, 4, 128, _BF16)
VARIANTS["prefill, head size 64"] = lambda: _prefill(4096, 32, 8, 64, torch.float16)
VARIANTS["prefill of short chunks, head size 64"] = lambda: _prefill(8, 32, 8, 64, torch.float16)
LAUNCHES["prefill, fp8, head size 256, window, soft cap, spans"] = lambda: _prefill(
    4096, 8, 4, 256, _BF16, fp8=True, spans=True, window=1024, soft_cap=50.0
)
VARIANTS["prefill, float32"] = lambda: _prefill(4096, 16, 8, 128, torch.float32)


def _kv_write(head_dim: int, dtype: torch.dtype, fp8: bool = False) -> None:
    new = torch.empty(32, 8, head_dim, dtype=dtype)
    slots = torch.empty(32, dtype=torch.int64)
    cache = _cache(8, head_dim, torch.float8_e4m3fn if fp8 else dtype)
    kv_write(new, new, cache, slots, torch.empty(2, 8) if fp8 else None)


def _blocks(copy: Callable[..., None], *, checksums: bool) -> None:
    rows = torch.empty(4, _NUM_LAYERS * 2 * _BLOCK_SIZE * 4 * 128, dtype=_BF16)
    ids = torch.empty(2, dtype=torch.int64)
    sums = torch.empty(2, 2, dtype=torch.int32) if checksums else None
    staging = torch.empty_like(rows[:2])
    if copy is gather_blocks:
        copy(rows, ids, staging, sums)
    else:
        copy(staging, ids, rows, sums)


def _embeddings(level: int) -> None:
    some = torch.empty(16, dtype=torch.int64)
    scatter_embeddings(torch.empty(32, 3584, dtype=_BF16), torch.empty(64, 7168, dtype=_BF16), some, some, level)


def _rotary(*, norm: bool) -> None:
    heads, angles = torch.empty(32, 32, 128, dtype=_BF16), torch.empty(32, 128)
    if norm:
        norm_rotary(heads, angles, torch.empty(32, 128, dtype=_BF16), 1e-6)
    else:
        rotary(heads, angles)


def _angles() -> None:
    mrope_angles(torch.empty(3, 32, dtype=torch.int64), torch.empty(64), torch.empty(64, dtype=torch.int64))


def _sample(dtype: torch.dtype) -> None:
    row, wide = torch.empty(32), torch.empty(32, dtype=torch.float64)
    top_k, keys = torch.empty(32, dtype=torch.int32), torch.empty(32, dtype=torch.int64)
    sample(torch.empty(32, 151936, dtype=dtype), row, top_k, wide, row, keys)


_HIDDEN, _GAIN = torch.empty(32, 3584, dtype=_BF16), torch.empty(3584, dtype=_BF16)
LAUNCHES["write of keys and values"] = lambda: _kv_write(128, _BF16)
LAUNCHES["write of keys and values as fp8, head size 80"] = lambda: _kv_write(80, _BF16, fp8=True)
LAUNCHES["gather of blocks"] = lambda: _blocks(gather_blocks, checksums=False)
LAUNCHES["scatter of blocks, checksums"] = lambda: _blocks(scatter_blocks, checksums=True)
LAUNCHES["image embeddings"] = lambda: _embeddings(0)
LAUNCHES["deepstack embeddings"] = lambda: _embeddings(1)
LAUNCHES["RMSNorm"] = lambda: rms_norm(_HIDDEN, _GAIN, 1e-6)
LAUNCHES["residual and RMSNorm"] = lambda: add_rms_norm(_HIDDEN, _HIDDEN, _GAIN, 1e-6)
LAUNCHES["SwiGLU"] = lambda: swiglu(torch.empty(32, 2 * 18944, dtype=_BF16))
LAUNCHES["M-RoPE's angles"] = _angles
LAUNCHES["rotary"] = lambda: _rotary(norm=False)
LAUNCHES["rotary with norms"] = lambda: _rotary(norm=True)
LAUNCHES["sampling"] = lambda: _sample(_BF16)
