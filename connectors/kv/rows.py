"""The rows of a KV cache as bytes: a row is one block of all layers, contiguous.

Where bytes are passed over twice, to copy them and for a checksum, the second pass follows while they are in the
processor's cache. Passes over more than a few kilobytes release the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from connectors.device_copy import DeviceCopies

Bytes = npt.NDArray[np.uint8]

#: Rows of neighbours that are shorter than this together are copied into one array: a frame costs more than the copy.
_MIN_FRAME_BYTES = 128 << 10
#: So much of what was just written is in a processor's own cache still.
_CACHED_BYTES = 512 << 10


def checksum_of(arrays: Iterable[Bytes]) -> bytes:
    """XXH3-128 of the arrays' bytes, end to end. Each array is contiguous."""
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(array.data)
    return hasher.digest()


def runs_of(*sequences: Sequence[int]) -> list[tuple[int, int]]:
    """Where [begin, end) each stretch lies in which every one of the sequences, all of one length, counts up by one."""
    length = len(sequences[0])
    if not length:
        return []
    broken = np.zeros(length - 1, dtype=np.bool_)
    for sequence in sequences:
        broken |= np.diff(np.asarray(sequence)) != 1
    cuts = [0, *(np.flatnonzero(broken) + 1).tolist(), length]
    return list(pairwise(cuts))


class BlockRows:
    """A cache `[num_blocks, elements_per_block]`, contiguous, on any device. Threads may use different rows at once."""

    def __init__(self, blocks: torch.Tensor) -> None:
        if blocks.ndim != 2 or not blocks.is_contiguous():
            raise ValueError(f"a KV cache is a contiguous matrix, not {tuple(blocks.shape)}")
        self._bytes = blocks.detach().view(torch.uint8)  # [num_blocks, row_bytes]
        self._copies = DeviceCopies(blocks.device)
        self._array: Bytes | None = self._bytes.numpy() if self._copies.on_host else None
        self.num_blocks, self.row_bytes = self._bytes.shape

    def gather(self, block_ids: Sequence[int], staging: Bytes | None = None) -> list[Bytes]:
        """The rows in order, as few arrays `[num_rows, row_bytes]`: views of the cache, one for each run of neighbours,
        where that makes large ones; else one copy, in pinned memory where the cache is on a GPU, in `staging`, flat,
        where that is large enough."""
        if self._array is None:
            return [self._copies.to_host([self._bytes[i] for i in block_ids]).numpy()]
        runs = runs_of(block_ids)
        num_bytes = len(block_ids) * self.row_bytes
        if len(runs) > 1 and num_bytes < len(runs) * _MIN_FRAME_BYTES:
            if staging is None or len(staging) < num_bytes:
                staging = np.empty(num_bytes, dtype=np.uint8)
            rows = staging[:num_bytes].reshape(-1, self.row_bytes)
            # "clip": else numpy makes another copy, to leave `rows` alone where an index is out of range. None is.
            self._array.take(np.asarray(block_ids), axis=0, out=rows, mode="clip")
            return [rows]
        return [self._array[block_ids[begin] : block_ids[begin] + end - begin] for begin, end in runs]

    def views(self, block_ids: Sequence[int]) -> list[Bytes]:
        """The rows in order, as views of a cache in host memory, one for each run of neighbours."""
        assert self._array is not None
        return [self._array[block_ids[begin] : block_ids[begin] + end - begin] for begin, end in runs_of(block_ids)]

    def scatter(self, block_ids: Sequence[int], rows: Sequence[Bytes]) -> None:
        """Copy the rows of the arrays `[num_rows, row_bytes]`, end to end, to the blocks. Complete on return."""
        if self._array is None:
            self._to_device(block_ids, rows)
            return
        begin = 0
        for array in rows:
            ids = block_ids[begin : begin + len(array)]
            begin += len(array)
            if len(runs_of(ids)) == 1:
                self._array[ids[0] : ids[0] + len(ids)] = array
            else:
                self._array[np.asarray(ids)] = array

    def copy_from(self, block_ids: Sequence[int], source: Bytes, source_ids: Sequence[int]) -> bytes:
        """Copy rows `source_ids` of `source`, `[any, row_bytes]` in host memory, to the blocks, and return the
        `checksum_of` what arrived there: taken of the copy, since the source may change at any time."""
        if self._array is None:
            rows = source.take(np.asarray(source_ids), axis=0)
            self._to_device(block_ids, [rows])
            return checksum_of([rows])
        hasher = xxhash.xxh3_128()
        most = max(1, _CACHED_BYTES // self.row_bytes)
        for begin, end in runs_of(block_ids, source_ids):
            for first in range(begin, end, most):
                count = min(most, end - first)
                target = self._array[block_ids[first] : block_ids[first] + count]
                target[:] = source[source_ids[first] : source_ids[first] + count]
                hasher.update(target.data)
        return hasher.digest()

    def _to_device(self, block_ids: Sequence[int], rows: Sequence[Bytes]) -> None:
        host = self._copies.empty_host((len(block_ids), self.row_bytes), torch.uint8)
        np.concatenate(rows, out=host.numpy())
        self._copies.to_device([(self._bytes[i], row) for i, row in zip(block_ids, host, strict=True)])
