"""Rows of a KV cache that lies on a device, to host memory and back.

A transfer's rows stand anywhere in the cache. They are gathered into one buffer on the device, or scattered from it, by
one launch, and cross over in one copy: a copy a row would keep the interpreter's lock for as many calls. The buffer is
made once; what does not fit goes in pieces. All of it runs on the stream of `DeviceCopies`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from connectors.device_copy import DeviceCopies
from connectors.kv.base import BlockMover

_STAGING_BYTES = 32 << 20


class DeviceRows:
    """`cache` `[num_blocks, row_bytes]` uint8. Any thread, one transfer at a time: others wait for the buffer."""

    def __init__(self, cache: torch.Tensor, copies: DeviceCopies, mover: BlockMover) -> None:
        self._cache = cache
        self._copies = copies
        self._mover = mover
        num_blocks, row_bytes = cache.shape
        count = min(num_blocks, max(1, _STAGING_BYTES // max(1, row_bytes)))
        self._staging = torch.empty(count, row_bytes, dtype=torch.uint8, device=cache.device)
        self._lock = threading.Lock()
        if num_blocks:  # kernels are compiled at their first launch: not in the first request's time
            self.to_device([0], self.to_host([0]))

    def to_host(self, block_ids: Sequence[int]) -> torch.Tensor:
        """The rows in order, `[len(block_ids), row_bytes]`, in fresh host memory, pinned."""
        host = self._copies.empty_host((len(block_ids), self._cache.shape[1]), torch.uint8)
        with self._lock, self._copies.aside():
            for ids, part, staging in self._pieces(block_ids, host):
                self._mover.gather_blocks(self._cache, ids, staging)
                part.copy_(staging, non_blocking=True)
        return host

    def to_device(self, block_ids: Sequence[int], host: torch.Tensor) -> None:
        """Copy `host` `[len(block_ids), row_bytes]`, from `empty_host`, to the blocks; complete on return."""
        with self._lock, self._copies.aside():
            for ids, part, staging in self._pieces(block_ids, host):
                staging.copy_(part, non_blocking=True)
                self._mover.scatter_blocks(staging, ids, self._cache)

    def _pieces(
        self, block_ids: Sequence[int], host: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As many blocks at a time as the buffer holds: their ids on the device, their rows, their part of it."""
        ids = self._copies.empty_host((len(block_ids),), torch.int64)
        ids.copy_(torch.tensor(block_ids, dtype=torch.int64))
        on_device = ids.to(self._cache.device, non_blocking=True)
        for some, part in zip(on_device.split(len(self._staging)), host.split(len(self._staging)), strict=True):
            yield some, part, self._staging[: len(some)]
