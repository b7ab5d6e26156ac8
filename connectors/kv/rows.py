"""The rows of a KV cache as bytes: a row is one block of all layers, contiguous.

Checksums are of a *grain* each, as many rows as stay in a processor's own cache: where bytes are passed over twice, to
copy them and for a checksum, the second pass finds them there. Both ends derive the grain from the size of a row.
Passes over more than a few kilobytes release the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from connectors.device_copy import DeviceCopies
from connectors.kv.base import BlockMover
from connectors.kv.device_rows import DeviceRows

Bytes = npt.NDArray[np.uint8]

#: Rows of neighbours that are shorter than this together are copied into one array: a frame costs more than the copy.
_MIN_FRAME_BYTES = 128 << 10
_GRAIN_BYTES = 512 << 10
#: To look for neighbours among rows as long as this costs more than to copy them one by one.
_LONG_ROW_BYTES = 64 << 10
CHECKSUM_BYTES = 16


def checksum_of(arrays: Iterable[Bytes]) -> bytes:
    """XXH3-128 of the arrays' bytes, end to end. Each array is contiguous."""
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(array.data)
    return hasher.digest()


def _split(checksums: bytes) -> list[bytes]:
    return [checksums[begin : begin + CHECKSUM_BYTES] for begin in range(0, len(checksums), CHECKSUM_BYTES)]


def runs_of(*sequences: Sequence[int]) -> list[tuple[int, int]]:
    """Where [begin, end) each stretch lies in which every one of the sequences, all of one length, counts up by one."""
    if not sequences[0]:
        return []
    cuts = {n for sequence in sequences for n, (a, b) in enumerate(pairwise(sequence), 1) if b != a + 1}
    return list(pairwise([0, *sorted(cuts), len(sequences[0])]))


def grains_of(arrays: Iterable[Bytes], num_rows: int) -> Iterator[list[Bytes]]:
    """The rows of the arrays, end to end, as stretches of `num_rows`; the last one may be shorter."""
    grain: list[Bytes] = []
    missing = num_rows
    for array in arrays:
        begin = 0
        while begin < len(array):
            grain.append(array[begin : begin + missing])
            begin += len(grain[-1])
            missing -= len(grain[-1])
            if not missing:
                yield grain
                grain, missing = [], num_rows
    if grain:
        yield grain


class BlockRows:
    """A cache `[num_blocks, elements_per_block]`, contiguous, on any device. Threads may use different rows at once.
    `mover` is for a cache that is not in host memory."""

    def __init__(self, blocks: torch.Tensor, mover: BlockMover | None = None) -> None:
        if blocks.ndim != 2 or not blocks.is_contiguous():
            raise ValueError(f"a KV cache is a contiguous matrix, not {tuple(blocks.shape)}")
        rows = blocks.detach().view(torch.uint8)  # [num_blocks, row_bytes]
        self._copies = DeviceCopies(blocks.device)
        self.num_blocks, self.row_bytes = rows.shape
        self.grain = max(1, _GRAIN_BYTES // max(1, self.row_bytes))  # rows
        self.on_host = self._copies.on_host
        self._array: Bytes | None = None
        self._device: DeviceRows | None = None  # one of the two
        if self.on_host:
            self._array = rows.numpy()
        elif mover is not None:
            self._device = DeviceRows(rows, self._copies, mover)
        else:
            raise ValueError(f"a KV cache on {blocks.device} needs a block mover, and the engine set none")

    def gather(self, block_ids: Sequence[int], staging: Callable[[int], Bytes]) -> list[Bytes]:
        """The rows in order, as few arrays `[num_rows, row_bytes]`: views of the cache, one for each run of neighbours,
        where that makes large ones; else one copy, in pinned memory where the cache is on a GPU, else in what `staging`
        returns when asked for at least so many bytes, flat."""
        if self._array is None:
            assert self._device is not None
            return [self._device.to_host(block_ids).numpy()]
        runs = runs_of(block_ids)
        num_bytes = len(block_ids) * self.row_bytes
        if len(runs) > 1 and num_bytes < len(runs) * _MIN_FRAME_BYTES:
            rows = staging(num_bytes)[:num_bytes].reshape(-1, self.row_bytes)
            # "clip": else numpy makes another copy, to leave `rows` alone where an index is out of range. None is.
            self._array.take(np.asarray(block_ids), axis=0, out=rows, mode="clip")
            return [rows]
        return [self._array[block_ids[begin] : block_ids[begin] + end - begin] for begin, end in runs]

    def views(self, block_ids: Sequence[int]) -> list[Bytes]:
        """The rows in order, as views of a cache in host memory, one for each run of neighbours."""
        assert self._array is not None
        return [self._array[block_ids[begin] : block_ids[begin] + end - begin] for begin, end in runs_of(block_ids)]

    def scatter(self, block_ids: Sequence[int], rows: Sequence[Bytes], checksums: bytes) -> bool:
        """Copy the rows of the arrays `[num_rows, row_bytes]`, end to end, to the blocks; complete on return.
        `checksums`: the `checksum_of` each grain of them, end to end. False where they do not match: nothing of a grain
        that is wrong is copied, nor what follows it."""
        expected = _split(checksums)
        if self._array is None:
            if list(map(checksum_of, grains_of(rows, self.grain))) != expected:
                return False
            self._to_device(block_ids, rows)
            return True
        begin = 0
        for n, grain in enumerate(grains_of(rows, self.grain)):
            if expected[n : n + 1] != [checksum_of(grain)]:
                return False
            for array in grain:
                ids = block_ids[begin : begin + len(array)]
                begin += len(array)
                if len(ids) == 1 or len(runs_of(ids)) == 1:
                    self._array[ids[0] : ids[0] + len(ids)] = array
                elif self.row_bytes >= _LONG_ROW_BYTES:
                    for place, row in zip(ids, array, strict=True):
                        self._array[place] = row
                else:
                    self._array[np.asarray(ids)] = array
        return True

    def copy_from(self, block_ids: Sequence[int], source: Bytes, source_ids: Sequence[int], checksums: bytes) -> bool:
        """As `scatter`, rows `source_ids` of `source`, `[any, row_bytes]` in host memory. That may change at any time,
        so the checksums are taken of what arrived, and what is wrong may stand in the blocks."""
        if self._array is None:
            return self.scatter(block_ids, [source.take(np.asarray(source_ids), axis=0)], checksums)
        expected = _split(checksums)
        for n, first in enumerate(range(0, len(block_ids), self.grain)):
            hasher = xxhash.xxh3_128()
            ours, theirs = block_ids[first : first + self.grain], source_ids[first : first + self.grain]
            if self.row_bytes >= _LONG_ROW_BYTES:
                for our, their in zip(ours, theirs, strict=True):
                    row = self._array[our]
                    row[:] = source[their]
                    hasher.update(row.data)
            else:
                for begin, end in runs_of(ours, theirs):
                    rows = self._array[ours[begin] : ours[begin] + end - begin]
                    rows[:] = source[theirs[begin] : theirs[begin] + end - begin]
                    hasher.update(rows.data)
            if expected[n : n + 1] != [hasher.digest()]:
                return False
        return True

    def _to_device(self, block_ids: Sequence[int], rows: Sequence[Bytes]) -> None:
        host = self._copies.empty_host((len(block_ids), self.row_bytes), torch.uint8)
        np.concatenate(rows, out=host.numpy())
        assert self._device is not None
        self._device.to_device(block_ids, host)
