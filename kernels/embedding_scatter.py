"""Image embeddings, and each deepstack level of them, from the encoder buffer into the token stream by index.

A row of the buffer holds the input embedding and then one part of the same width for each deepstack level. One level
goes straight from the buffer to its tokens: no gathered copy, and no boolean mask, whose count the host would wait for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cache_twins import scatter_embeddings_torch

__all__ = ["scatter_embeddings", "scatter_embeddings_torch"]

_BLOCK = 1024


@triton.jit
def embedding_scatter_kernel(
    hidden,
    buffer,
    tokens,
    rows,
    hidden_stride,
    buffer_stride,
    width,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    made = tl.load(buffer + tl.load(rows + i) * buffer_stride + columns, mask=inside, other=0.0)
    place = hidden + tl.load(tokens + i) * hidden_stride + columns
    if ADD:
        made = (made.to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(made.dtype)
    tl.store(place, made, mask=inside)


def scatter_embeddings(
    hidden: torch.Tensor, buffer: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, level: int
) -> None:
    """Level 0: `hidden[tokens[i]] = embedding`, beyond: `hidden[tokens[i]] += level`, both of `buffer[rows[i]]`.

    `hidden` `[num_tokens, width]`; `buffer` `[num_rows, width * (1 + levels)]`, the same dtype; `tokens`, each once,
    and `rows` `[n]` int64 (not checked against the sizes: that would wait for the device).
    """
    _check(hidden, buffer, tokens, rows, level)
    if len(tokens):
        width = hidden.shape[1]
        grid = (len(tokens), triton.cdiv(width, _BLOCK))
        embedding_scatter_kernel[grid](
            hidden,
            buffer[:, level * width :],
            tokens,
            rows,
            hidden.stride(0),
            buffer.stride(0),
            width,
            ADD=level > 0,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def _check(hidden: torch.Tensor, buffer: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, level: int) -> None:
    width = hidden.shape[1]
    if (
        tokens.shape != rows.shape
        or buffer.dtype != hidden.dtype
        or level < 0
        or (level + 1) * width > buffer.shape[1]
        or not hidden.stride(1) == buffer.stride(1) == 1
    ):
        raise ValueError(
            f"scatter_embeddings: level {level} of buffer {tuple(buffer.shape)} {buffer.dtype} into hidden "
            f"{tuple(hidden.shape)} {hidden.dtype} at {tuple(tokens.shape)} from {tuple(rows.shape)}"
        )
