"""The items that an encoder keeps for its consumers: bounded host memory, oldest unleased first out."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash

from connectors.ec.peer_wire import MAX_CHUNKS, dtype_name
from connectors.ec.store import CHUNK_BYTES, ECStore, ItemError, LoadTarget, SaveSource, StoreError, bytes_of

#: What an item costs besides its bytes, roughly: many tiny items must not be free.
ITEM_OVERHEAD_BYTES = 1024
#: Somebody who asked for a chunk will ask for the next one; the item stays at least so long.
_PULL_GRACE_S = 2.0
#: How long somebody is expected who was told of an item that is not new: as a rule he has it and says nothing, else he
#: asks at once.
_TOLD_S = 2.0
#: … and how long one who has asked: his request waits for its turn. He is believed once: engines that find an item
#: elsewhere ask again and again, and never come.
_ASKED_S = 10.0


class HeldItem:
    """One item. Its bytes never change; whoever still has a view of them keeps them alive."""

    __slots__ = ("_data", "checksums", "dtype", "key", "leased_until_s", "num_bytes", "shape")

    def __init__(self, key: str, embeds: torch.Tensor, data: torch.Tensor, checksums: list[bytes]) -> None:
        rows, width = embeds.shape
        self.key = key
        self.shape = (rows, width)
        self.dtype = dtype_name(embeds.dtype)
        self.num_bytes = embeds.nbytes
        self.checksums = checksums  # XXH3-128 of each chunk
        self.leased_until_s = 0.0  # monotonic
        self._data = bytes_of(data)

    @property
    def cost_bytes(self) -> int:
        return self.num_bytes + ITEM_OVERHEAD_BYTES

    def chunk(self, index: int) -> memoryview:
        """No copy."""
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def damaged_chunk(self) -> int | None:
        """The first chunk that is not what was saved."""
        for index, checksum in enumerate(self.checksums):
            if xxhash.xxh3_128_digest(self.chunk(index)) != checksum:
                return index
        return None


class ItemMemory(ECStore):
    """At most `capacity_bytes`. A saved item is leased for `lease_s`: not evicted until it was pulled once or that time
    is over. `changed` is called, on any thread, when `take_changes` or `num_awaited` has something to tell. Every
    method: any thread.

    An item is *awaited* while a consumer in another engine may come for it. That says nothing of eviction: were items
    kept that are told of again and again, there would be no room for new ones.
    """

    def __init__(self, capacity_bytes: int, lease_s: float, changed: Callable[[], None]) -> None:
        self._capacity_bytes = capacity_bytes
        self._lease_s = lease_s
        self._changed = changed
        self._lock = threading.Lock()
        self._items: OrderedDict[str, HeldItem] = OrderedDict()  # the one used least recently first
        self._used_bytes = 0  # of items, and of those being written
        self._changes: dict[str, bool] = {}
        self._awaited: dict[str, float] = {}  # key -> until when, monotonic
        self._asked: set[str] = set()  # keys asked about since they were saved, told of or pulled last
        self._evictions = 0
        self._closed = False

    def contains(self, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return [key in self._items for key in keys]

    def read(self, key: str, target: LoadTarget) -> None:
        with self._lock:
            item = self._find(key)
        if item is None:
            raise ItemError("item is not held any more")
        if (item.dtype, item.shape) != (dtype_name(target.dtype), target.shape):
            raise ItemError(f"item is {item.dtype} {item.shape}, not {dtype_name(target.dtype)} {target.shape}")
        for index, checksum in enumerate(item.checksums):
            chunk = item.chunk(index)
            if xxhash.xxh3_128_digest(chunk) != checksum:
                self.drop(item)
                raise ItemError("checksum of the item does not match", damaged=True)
            target.write(chunk, index * CHUNK_BYTES)

    def write(self, key: str, source: SaveSource) -> None:
        num_bytes = source.embeds.nbytes
        with self._lock:
            present = self._items.get(key)
            if present is not None:
                self._items.move_to_end(key)
                self._asked.discard(key)
                self._awaited[key] = present.leased_until_s = time.monotonic() + self._lease_s
        if present is not None:
            if present.damaged_chunk() is None:
                return
            self.drop(present)
        if not num_bytes:
            raise ItemError("an item without bytes")
        if num_bytes > MAX_CHUNKS * CHUNK_BYTES:
            raise ItemError(f"an item of {num_bytes} bytes is longer than {MAX_CHUNKS} MiB")
        cost_bytes = num_bytes + ITEM_OVERHEAD_BYTES
        self._reserve(cost_bytes)
        try:
            item = _copy(key, source)
            source.check()
        except BaseException:
            with self._lock:
                self._used_bytes -= cost_bytes
            raise
        item.leased_until_s = time.monotonic() + self._lease_s
        with self._lock:
            if self._closed or key in self._items:  # two writers of one item: the first one's stays
                self._used_bytes -= cost_bytes
            if self._closed:
                raise StoreError("closed")
            self._changes[key] = True
            self._awaited[key] = item.leased_until_s
            self._items.setdefault(key, item)

    def find(self, key: str) -> HeldItem | None:
        """The item, for a consumer that is about to read some of it."""
        with self._lock:
            item = self._find(key)
            if item is not None:
                self._await(key, _PULL_GRACE_S)
            return item

    def pulled(self, key: str) -> None:
        """Somebody has all of it: it may go when there is no room."""
        with self._lock:
            if key in self._items:
                self._items[key].leased_until_s = 0.0
        self.not_awaited(key)

    def told(self, key: str) -> None:
        """One more consumer knows where the item is, and may ask for it."""
        with self._lock:
            if key in self._items:
                self._asked.discard(key)
                self._await(key, min(self._lease_s, _TOLD_S))

    def asked(self, keys: Sequence[str]) -> None:
        """A consumer lacks these, and will come for them when their requests' turn comes."""
        with self._lock:
            for key in keys:
                if key in self._items and key not in self._asked:
                    self._asked.add(key)
                    self._await(key, min(self._lease_s, _ASKED_S))

    def not_awaited(self, key: str) -> None:
        """Whoever was told of the item has it, or takes it from within this engine."""
        with self._lock:
            self._asked.discard(key)
            was_awaited = self._awaited.pop(key, None) is not None
        if was_awaited:
            self._changed()

    def drop(self, item: HeldItem) -> None:
        """It is damaged."""
        with self._lock:
            if self._items.get(item.key) is not item:
                return
            self._remove(item)
        self._changed()

    def take_changes(self) -> dict[str, bool]:
        """What came (True) and went (False) since the last call."""
        with self._lock:
            changes, self._changes = self._changes, {}
            return changes

    def num_awaited(self) -> int:
        """Items that a consumer may still come for."""
        now_s = time.monotonic()
        with self._lock:
            for key in [key for key, until_s in self._awaited.items() if until_s <= now_s]:
                del self._awaited[key]
            return len(self._awaited)

    def take_counters(self) -> Mapping[str, int]:
        with self._lock:
            evictions, self._evictions = self._evictions, 0
        return {"evictions": evictions}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._items.clear()
            self._awaited.clear()
            self._asked.clear()

    def _reserve(self, cost_bytes: int) -> None:
        """Make room. Raises ItemError where there is none; then nothing was evicted."""
        now_s = time.monotonic()
        with self._lock:
            lacking_bytes = self._used_bytes + cost_bytes - self._capacity_bytes
            victims = []
            for item in self._items.values():
                if lacking_bytes <= 0:
                    break
                if item.leased_until_s <= now_s:
                    victims.append(item)
                    lacking_bytes -= item.cost_bytes
            if lacking_bytes > 0:
                raise ItemError(
                    f"no room for {cost_bytes} bytes in the encoder's memory: capacity_bytes={self._capacity_bytes}, "
                    f"{len(self._items)} items, leased ones are not evicted"
                )
            for item in victims:
                self._remove(item)
            self._evictions += len(victims)
            self._used_bytes += cost_bytes

    def _find(self, key: str) -> HeldItem | None:
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
            item.leased_until_s = max(item.leased_until_s, time.monotonic() + _PULL_GRACE_S)
        return item

    def _await(self, key: str, for_s: float) -> None:
        self._awaited[key] = max(self._awaited.get(key, 0.0), time.monotonic() + for_s)

    def _remove(self, item: HeldItem) -> None:
        del self._items[item.key]
        self._awaited.pop(item.key, None)
        self._asked.discard(item.key)
        self._used_bytes -= item.cost_bytes
        self._changes[item.key] = False


def _copy(key: str, source: SaveSource) -> HeldItem:
    """Each chunk's checksum is taken of the copy, while it is still in the core's cache."""
    data = torch.empty(source.embeds.nbytes, dtype=torch.uint8)
    theirs = source.embeds.detach().view(-1).view(torch.uint8)
    ours = bytes_of(data)
    checksums = []
    for begin in range(0, len(ours), CHUNK_BYTES):
        end = min(begin + CHUNK_BYTES, len(ours))
        data[begin:end].copy_(theirs[begin:end])
        checksums.append(xxhash.xxh3_128_digest(ours[begin:end]))
    return HeldItem(key, source.embeds, data, checksums)
