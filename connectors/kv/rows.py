"""The rows of a KV cache as bytes: a row is one block of all layers, contiguous.

Checksums are of a *grain* each, as many rows as stay in a processor's own cache: where bytes are passed over twice, to
copy them and for a checksum, the second pass finds them there. Both ends derive the grain from the size of a row.
Passes over more than a few kilobytes release the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from connectors.device_copy import DeviceCopies
from connectors.kv.arrival import Arrival
from connectors.kv.base import BlockMover
from connectors.kv.device_rows import DeviceRows

Bytes = npt.NDArray[np.uint8]

#: Runs of neighbours that are shorter than this are copied together to be summed up in one call.
_LONG_RUN_BYTES = 128 << 10
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
        self._memory: memoryview | None = None  # the array's, flat
        self._device: DeviceRows | None = None  # one of the two
        if self.on_host:
            self._array = rows.numpy()
            self._memory = _flat(self._array)
        elif mover is not None:
            self._device = DeviceRows(rows, self._copies, mover)
        else:
            raise ValueError(f"a KV cache on {blocks.device} needs a block mover, and the engine set none")

    def read(self, block_ids: Sequence[int]) -> list[Bytes]:
        """The rows in order, as arrays `[num_rows, row_bytes]`: views of the cache, one for each run of neighbours, or
        one copy in pinned memory where the cache is on a device."""
        if self._array is None:
            assert self._device is not None
            return [self._device.to_host(block_ids).numpy()]
        return [self._array[block_ids[begin] : block_ids[begin] + end - begin] for begin, end in runs_of(block_ids)]

    def gather(self, block_ids: Sequence[int], scratch: Callable[[int], Bytes]) -> list[Bytes]:
        """As `read`, of a cache in host memory, but short rows as one copy, in what `scratch` returns when asked for at
        least so many bytes, flat."""
        assert self._array is not None
        rows = self.read(block_ids)
        num_bytes = len(block_ids) * self.row_bytes
        if len(rows) == 1 or num_bytes >= len(rows) * _LONG_RUN_BYTES:
            return rows
        copy = scratch(num_bytes)[:num_bytes].reshape(-1, self.row_bytes)
        # "clip": else numpy makes another copy, to leave `copy` alone where an index is out of range. None is.
        self._array.take(np.asarray(block_ids), axis=0, out=copy, mode="clip")
        return [copy]

    def arrival(self, block_ids: Sequence[int], checksums: bytes) -> Arrival:
        """To receive the blocks' rows. `checksums`: the `checksum_of` each grain of them, end to end. What is wrong may
        stand in the blocks, of a cache in host memory."""
        num_bytes, expected = len(block_ids) * self.row_bytes, _split(checksums)
        if self._memory is not None:
            return Arrival(num_bytes, self._places(self._memory, block_ids), expected)
        host = self._copies.empty_host((len(block_ids), self.row_bytes), torch.uint8)
        assert self._device is not None
        land = partial(self._device.to_device, block_ids, host)
        places = self._places(_flat(host.numpy()), range(len(block_ids)))
        return Arrival(num_bytes, places, expected, land)

    def copy_from(self, block_ids: Sequence[int], source: Bytes, source_ids: Sequence[int], checksums: bytes) -> bool:
        """Copy rows `source_ids` of `source`, `[any, row_bytes]` in host memory, to the blocks; complete on return.
        False where they do not match `checksums`, which are as for `arrival`. The rows may change at any time, so the
        checksums are taken of what arrived, and what is wrong may stand in the blocks."""
        expected = _split(checksums)
        if self._array is None:
            host = self._copies.empty_host((len(block_ids), self.row_bytes), torch.uint8)
            rows = source.take(np.asarray(source_ids), axis=0, out=host.numpy(), mode="clip")
            if list(map(checksum_of, grains_of([rows], self.grain))) != expected:
                return False
            assert self._device is not None
            self._device.to_device(block_ids, host)
            return True
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

    def _places(self, memory: memoryview, block_ids: Sequence[int]) -> Iterator[list[memoryview]]:
        """The blocks' bytes in a memory of rows, by grain."""
        size = self.row_bytes
        for first in range(0, len(block_ids), self.grain):
            ids = block_ids[first : first + self.grain]
            yield [memory[ids[begin] * size : (ids[begin] + end - begin) * size] for begin, end in runs_of(ids)]


def _flat(array: Bytes) -> memoryview:
    return array.reshape(-1).data
