"""The rows of a KV cache as bytes: a row is one block of all layers, contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from connectors.device_copy import DeviceCopies

Bytes = npt.NDArray[np.uint8]


class BlockRows:
    """A cache `[num_blocks, elements_per_block]`, contiguous, on any device. Threads may use different rows at once."""

    def __init__(self, blocks: torch.Tensor) -> None:
        if blocks.ndim != 2 or not blocks.is_contiguous():
            raise ValueError(f"a KV cache is a contiguous matrix, not {tuple(blocks.shape)}")
        self._bytes = blocks.detach().view(torch.uint8)  # [num_blocks, row_bytes]
        self._copies = DeviceCopies(blocks.device)
        self._array: Bytes | None = self._bytes.numpy() if self._copies.on_host else None
        self.num_blocks, self.row_bytes = self._bytes.shape

    def gather(self, block_ids: Sequence[int]) -> list[Bytes]:
        """The rows in order, as few arrays `[num_rows, row_bytes]`. In host memory already: views of the cache, one for
        each run of neighbours, no copy. Else: one copy in pinned memory."""
        if self._array is None:
            return [self._copies.to_host([self._bytes[i] for i in block_ids]).numpy()]
        cuts = [0, *(i for i in range(1, len(block_ids)) if block_ids[i] != block_ids[i - 1] + 1), len(block_ids)]
        return [self._array[block_ids[begin] : block_ids[begin] + end - begin] for begin, end in pairwise(cuts)]

    def scatter(self, block_ids: Sequence[int], rows: Sequence[Bytes]) -> None:
        """Copy `rows[i]`, `[row_bytes]`, to block `block_ids[i]`. The copies are complete on return."""
        if self._array is not None:
            for block_id, row in zip(block_ids, rows, strict=True):
                self._array[block_id] = row
            return
        host = self._copies.empty_host((len(rows), self.row_bytes), torch.uint8)
        np.stack(rows, out=host.numpy())
        self._copies.to_device([(self._bytes[i], row) for i, row in zip(block_ids, host, strict=True)])
