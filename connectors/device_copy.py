"""Copies between host memory and one device, on a stream of the connector's own, never in the way of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceCopies:
    """Any thread. Each copy is complete when its call returns. Callers stage nothing where `on_host`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    def mark(self) -> torch.cuda.Event | None:
        """The point that the calling thread's stream has reached: what is queued before it must be done before a copy
        that is told to come `after` it."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()  # type: ignore[no-any-return]

    def empty_host(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Host memory to stage in, pinned where that makes the copy faster."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def to_host(self, tensors: list[torch.Tensor], after: torch.cuda.Event | None = None) -> torch.Tensor:
        """`tensors`, each `[...]` of one shape and dtype, stacked as `[len(tensors), ...]` in fresh host memory."""
        host = self.empty_host((len(tensors), *tensors[0].shape), tensors[0].dtype)
        self._copy(list(zip(host, tensors, strict=True)), after)
        return host

    def to_device(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each pair's second tensor, host memory from `empty_host`, into its first, on the device."""
        self._copy(pairs, None)

    @contextmanager
    def aside(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """What is queued within runs on the stream of its own, and is complete when it is left."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            try:
                yield
            finally:
                self._stream.synchronize()  # after an error too: nothing is written once it is known

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event | None) -> None:
        with self.aside(after):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
