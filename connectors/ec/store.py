"""What a store is to `ECStoreConnector`: three blocking methods. The connector does the rest.

A store need not care about threads, time limits, circuit breaking, the encoder buffer or the device: it is handed a
*source* to write from and a *target* to read into, both in host memory, and raises what went wrong.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from connectors.device_copy import DeviceCopies
from connectors.ec.base import never
from connectors.ec.rests import Rests

#: What a checksum or a copy takes at a time: it stays in a core's own cache between the two.
CHUNK_BYTES = 1 << 20
#: What is copied with the interpreter's lock held, since to let go of it and take it again would cost more.
_SHORT_BYTES = 64 << 10

_RESTS = Rests()
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether `text` has the form of a key or of a namespace: 64 hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


class ItemError(Exception):
    """An item cannot be used: absent, cut short, corrupt, of another shape, version or namespace. The store is well.
    `damaged`: the item never will be usable, by anyone, so it had better be removed."""

    def __init__(self, reason: str, *, damaged: bool = False) -> None:
        super().__init__(reason)
        self.damaged = damaged


class StoreError(Exception):
    """The store did not do its work: down, slow, full, forbidden. Counts towards the circuit breaker, as does OSError.
    The reason is fit for a log: no paths, no passwords."""


class AbandonedError(Exception):
    """The time limit of this load or save is over; its memory may belong to somebody else by now. Let it pass."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as flat bytes; no copy. (NumPy has no bfloat16, but it has bytes.)"""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


class LoadTarget:
    """Where one item is to go: `shape` `[num_embeds, width]` of `dtype`, `num_bytes` in all.

    `write` and `fill` may be called by one thread, in any order of offsets. After the time limit they raise
    AbandonedError and touch nothing. What was written is read by nobody unless the store's `read` returns.

    `data`: `bytes_of` the slice, if the caller has it at hand: to ask torch takes longer than to copy a small item.
    `is_crowded`: `ECConnectorConfig`'s; `write` and `fill` return later while a step needs all processors.
    """

    def __init__(
        self,
        slice_: torch.Tensor,
        copies: DeviceCopies,
        data: memoryview | None = None,
        is_crowded: Callable[[], bool] = never,
    ) -> None:
        self.shape = tuple(slice_.shape)
        self.dtype = slice_.dtype
        self._slice = slice_
        self._copies = copies
        self._host = slice_ if copies.on_host else copies.empty_host(slice_.shape, slice_.dtype)
        self._bytes = bytes_of(self._host) if data is None else data
        self.num_bytes = self._bytes.nbytes
        self._is_crowded = is_crowded
        self._lock = threading.Lock()
        self._abandoned = False

    def write(self, data: memoryview | bytes | bytearray, offset: int = 0) -> None:
        """Copy `data`, flat bytes, to `offset`. Chunks of CHUNK_BYTES keep `abandon` from waiting long. Raises
        ItemError where it does not fit."""
        view = memoryview(data).cast("B")
        target = self._bytes[offset : self._end(offset, view.nbytes)]
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            if view.nbytes <= _SHORT_BYTES:
                target[:] = view
            else:
                # Not the C library's copy, which is slow where the two are not aligned alike; here they seldom are.
                torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(view, dtype=torch.uint8))
        _RESTS.after(view.nbytes, self._is_crowded)

    def fill(self, offset: int, num_bytes: int, read: Callable[[memoryview], None]) -> memoryview:
        """`write` without a copy: `read` is handed the `num_bytes` at `offset` and fills them; they are returned, for a
        checksum. Only for what cannot hang, and for a chunk at a time, since `abandon` waits for it."""
        into = self._bytes[offset : self._end(offset, num_bytes)]
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            read(into)
        _RESTS.after(num_bytes, self._is_crowded)
        return into

    def _end(self, offset: int, num_bytes: int) -> int:
        end = offset + num_bytes
        if not 0 <= offset <= end <= self.num_bytes:
            raise ItemError(f"bytes {offset} to {end} of an item of {self.num_bytes}", damaged=True)
        return end

    def commit(self) -> None:
        """The connector's, after the store's `read`: bring it to the device. Raises AbandonedError."""
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            if not self._copies.on_host:
                self._copies.to_device([(self._slice, self._host)])

    def abandon(self) -> None:
        """The connector's: from the return of this call on, nothing is written any more. Any thread."""
        with self._lock:
            self._abandoned = True


class SaveSource:
    """One item to store: `embeds`, `[num_embeds, width]`, contiguous, in host memory, not to be written to.

    A store calls `check` after it has read the last byte (checksum included) and before it makes the item visible: once
    the time limit is over the memory belongs to somebody else, and what was read of it may be wrong.
    """

    def __init__(self, embeds: torch.Tensor, is_over: Callable[[], bool]) -> None:
        self.embeds = embeds
        self._is_over = is_over

    @property
    def data(self) -> memoryview:
        """All of the item as flat bytes; no copy."""
        return bytes_of(self.embeds)

    def check(self) -> None:
        """Raises AbandonedError once the time limit is over."""
        if self._is_over():
            raise AbandonedError


class ECStore(ABC):
    """A place that keeps items by key, for one namespace. Each method may block and may be called by several threads at
    once. Keys are 64 hexadecimal digits: the connector has checked them."""

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> list[bool]:
        """For each key whether its item can be seen now, in as few round trips as possible, without listing the store.
        Raises StoreError or OSError where the store does not answer."""

    @abstractmethod
    def read(self, key: str, target: LoadTarget) -> None:
        """Fill `target`, whole and verified. Raises ItemError, StoreError or OSError; then what it wrote is ignored."""

    @abstractmethod
    def write(self, key: str, source: SaveSource) -> None:
        """Make the item visible, whole or not at all. Writing what is there already succeeds, and repairs it if it is
        damaged. Raises ItemError where this item cannot be stored, StoreError or OSError where nothing can."""

    def maintain(self, closing: threading.Event) -> None:  # noqa: B027 - optional
        """Whatever is to be done in the background: sweeping, eviction. Called once on a thread of its own on the
        worker side of a producer; returns soon after `closing` is set."""

    def item_source(self, key: str) -> str:
        """See `ECConnectorBase.item_source`."""
        return ""

    def add_item_source(self, key: str, source: str) -> None:  # noqa: B027 - optional
        """See `ECConnectorBase.add_item_source`."""

    def take_counters(self) -> Mapping[str, int]:
        """See `ECConnectorBase.take_counters`."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free everything. Threads may still be in other methods, which then raise StoreError or OSError."""
