"""Attention over the paged cache, at the heads of a 7B model (28 to 4, of 128) and of an 8B one (32 to 8).

PyTorch has no attention over our cache, so the others are given contiguous keys and values of equal lengths, made
beforehand: what they would cost at best.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.measuring import Case, Sizes
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

_BLOCK_SIZE, _NUM_LAYERS = 16, 2
_BF16 = torch.bfloat16


class Batch:
    """Equal sequences, their blocks in random order over a cache of two layers."""

    def __init__(
        self, sizes: Sizes, num_seqs: int, seq_len: int, num_new: int, heads: tuple[int, int, int], fp8: bool = False
    ) -> None:
        self.quick = sizes.quick
        self.num_seqs, self.seq_len, self.num_new = num_seqs, seq_len, num_new
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        device = sizes.device
        width = -(-seq_len // _BLOCK_SIZE)
        shape = (num_seqs * width, _NUM_LAYERS, 2, _BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        cache = torch.empty(shape, dtype=_BF16, device=device).normal_()
        self.cache = (cache.to(torch.float8_e4m3fn) if fp8 else cache)[:, 1]
        order = torch.randperm(num_seqs * width, device=device)
        self.table = order.to(torch.int32).view(num_seqs, width)
        self.seq_lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device)
        self.starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_new
        self.query = torch.randn(num_seqs * num_new, self.num_heads, self.head_dim, device=device).to(_BF16)
        self.scales = torch.ones(2, self.num_kv_heads, device=device) if fp8 else None
        self.scale = self.head_dim**-0.5

    @property
    def cached_bytes(self) -> int:
        """Of all keys and values."""
        return 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_dim * self.cache.element_size()

    @property
    def num_bytes(self) -> int:
        return self.cached_bytes + 2 * self.query.numel() * self.query.element_size()

    @property
    def flops(self) -> float:
        """Two products over the keys that each new token sees."""
        num_seen = self.num_new * (self.seq_len - self.num_new) + self.num_new * (self.num_new + 1) / 2
        return 4.0 * self.num_seqs * self.num_heads * self.head_dim * num_seen

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value `[num_seqs, heads, tokens, head_dim]`."""
        query = self.query.view(self.num_seqs, self.num_new, self.num_heads, self.head_dim).transpose(1, 2)
        shape = (self.num_seqs, self.num_kv_heads, self.seq_len, self.head_dim)
        key, value = (torch.randn(shape, dtype=_BF16, device=self.query.device) for _ in range(2))
        return query.contiguous(), key, value

    def others(self) -> dict[str, Callable[[], object]]:
        # Made at the first call: what one contender needs is not there while another is measured, nor with `--only`.
        made = functools.cache(self.contiguous)
        is_causal = self.num_new == self.seq_len
        mask = functools.cache(lambda: _causal_mask(self) if self.num_new > 1 and not is_causal else None)

        def sdpa() -> object:
            query, key, value = made()
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask(), is_causal=is_causal and self.num_new > 1, enable_gqa=True
            )

        flex = functools.cache(lambda: _flex_attention(self))
        contenders: dict[str, Callable[[], object]] = {"SDPA": sdpa}
        if not self.quick:
            contenders["FlexAttention"] = lambda: flex()(*made())
        return contenders


def _causal_mask(batch: Batch) -> torch.Tensor:
    ones = torch.ones(batch.num_new, batch.seq_len, dtype=torch.bool, device=batch.query.device)
    return ones.tril_(batch.seq_len - batch.num_new)


def _flex_attention(batch: Batch) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_cached = batch.seq_len - batch.num_new

    def sees(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return key <= query + num_cached

    block_mask = None
    if batch.num_new > 1:
        block_mask = create_block_mask(sees, None, None, batch.num_new, batch.seq_len, device=batch.query.device.type)
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, block_mask=block_mask, enable_gqa=True)


def decode_cases(sizes: Sizes) -> Iterator[Case]:
    shapes = [(32, 8192, (32, 8, 128), False), (32, 8192, (28, 4, 128), False), (1, 8192, (28, 4, 128), False)]
    shapes += [(1, 131072, (32, 8, 128), False), (128, 1024, (32, 8, 128), False), (32, 8192, (32, 8, 128), True)]
    shapes += [(32, 8192, (8, 4, 256), False), (32, 8192, (12, 2, 64), False)]
    if sizes.quick:
        shapes = [(2, 70, (4, 2, 16), False), (2, 70, (4, 2, 16), True)]
    for num_seqs, seq_len, heads, fp8 in shapes:
        batch = Batch(sizes, num_seqs, seq_len, 1, heads, fp8)
        yield Case(
            kernel="decode",
            shape=f"{num_seqs} x {seq_len}, heads {heads[0]}:{heads[1]} of {heads[2]}{', fp8' if fp8 else ''}",
            ours=functools.partial(
                paged_decode,
                batch.query,
                batch.cache,
                batch.table,
                batch.seq_lens,
                batch.scale,
                cache_scales=batch.scales,
                max_seq_len=seq_len,
            ),
            num_bytes=batch.num_bytes,
            others=batch.others(),
            goal=0.8 if (num_seqs, seq_len) == (32, 8192) and not fp8 and heads[2] == 128 else None,
        )


def prefill_cases(sizes: Sizes) -> Iterator[Case]:
    # (sequences, length, new): whole prompts, a chunk far into a long prompt, short questions after cached ones.
    shapes = [(1, 8192, 8192, (32, 8, 128)), (4, 4096, 4096, (28, 4, 128)), (1, 32768, 2048, (32, 8, 128))]
    shapes += [(64, 2048, 32, (28, 4, 128)), (1, 8192, 8192, (8, 4, 256)), (1, 8192, 8192, (12, 2, 64))]
    if sizes.quick:
        shapes = [(2, 40, 40, (4, 2, 16)), (2, 40, 6, (4, 2, 16))]
    for num_seqs, seq_len, num_new, heads in shapes:
        batch = Batch(sizes, num_seqs, seq_len, num_new, heads)
        yield Case(
            kernel="prefill",
            shape=f"{num_seqs} x {num_new} of {seq_len}, heads {heads[0]}:{heads[1]} of {heads[2]}",
            ours=functools.partial(
                paged_prefill, batch.query, batch.cache, batch.table, batch.starts, batch.seq_lens, batch.scale
            ),
            num_bytes=batch.num_bytes,
            flops=batch.flops,
            others=batch.others(),
            goal=0.6 if num_new >= 2048 and heads[2] == 128 else None,
        )
