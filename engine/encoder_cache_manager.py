"""What the encoder buffer holds: one fixed device tensor, cut into whole items.

An item is *filling* while a connector or the vision tower writes to it, and *ready* afterwards. A ready item is kept by
the requests that refer to it and by a save under way; one that nobody keeps stays until its rows are wanted, oldest
first. Rows are handed out first fit and neighbours that become free are joined.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from connectors.ec.base import BufferSlice


@dataclass(slots=True)
class _Item:
    where: BufferSlice
    ready: bool = False
    holders: set[str] = field(default_factory=set)  # request ids, and "save" while it is being stored


class EncoderCacheManager:
    """Accounts the buffer in rows; a row is `row_bytes` wide, deepstack levels included. Step thread only."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self._items: OrderedDict[str, _Item] = OrderedDict()  # least recently used first
        self._free: list[BufferSlice] = [BufferSlice(0, num_rows)] if num_rows else []
        self.num_evictions = 0

    # ---- questions ----

    def is_ready(self, key: str) -> bool:
        item = self._items.get(key)
        return item is not None and item.ready

    def is_filling(self, key: str) -> bool:
        item = self._items.get(key)
        return item is not None and not item.ready

    def where(self, key: str) -> BufferSlice:
        return self._items[key].where

    @property
    def num_items(self) -> int:
        return len(self._items)

    @property
    def bytes_held(self) -> int:
        """Bytes of items that are filling or kept by somebody."""
        rows = sum(item.where.num_rows for item in self._items.values() if item.holders or not item.ready)
        return rows * self.row_bytes

    def has_room(self, num_rows: int) -> bool:
        """Whether `allocate` would find room: the holes and the items that nobody keeps, neighbours joined, have one
        stretch that is long enough."""
        if any(hole.num_rows >= num_rows for hole in self._free):
            return True
        run, end = 0, -1
        for stretch in sorted([*self._free, *(self._items[key].where for key in self._idle())], key=lambda s: s.start):
            run = run + stretch.num_rows if stretch.start == end else stretch.num_rows
            end = stretch.start + stretch.num_rows
            if run >= num_rows:
                return True
        return False

    # ---- changes ----

    def allocate(self, key: str, num_rows: int) -> BufferSlice | None:
        """Room for a new item, which is then filling. Evicts ready items that nobody keeps, oldest first, as few as
        will do. None where even that is not enough; then nothing was changed."""
        assert key not in self._items, key
        where = self._take(num_rows)
        if where is None:
            where = self._evict_for(num_rows)
            if where is None:
                return None
        self._items[key] = _Item(where)
        return where

    def set_ready(self, key: str) -> None:
        self._items[key].ready = True
        self._items.move_to_end(key)

    def hold(self, key: str, holder: str) -> None:
        """Keep an item, ready or filling."""
        self._items[key].holders.add(holder)
        self._items.move_to_end(key)

    def let_go(self, key: str, holder: str) -> None:
        """Undo `hold`. Unknown holders and keys are ignored."""
        item = self._items.get(key)
        if item is not None:
            item.holders.discard(holder)

    def drop(self, key: str) -> None:
        """Forget an item whose filling failed."""
        self._give_back(self._items.pop(key).where)

    # ---- rows ----

    def _take(self, num_rows: int) -> BufferSlice | None:
        for i, hole in enumerate(self._free):
            if hole.num_rows >= num_rows:
                rest = BufferSlice(hole.start + num_rows, hole.num_rows - num_rows)
                self._free[i : i + 1] = [rest] if rest.num_rows else []
                return BufferSlice(hole.start, num_rows)
        return None

    def _idle(self) -> list[str]:
        """Items that nobody keeps, oldest first."""
        return [key for key, item in self._items.items() if item.ready and not item.holders]

    def _evict_for(self, num_rows: int) -> BufferSlice | None:
        if not self.has_room(num_rows):
            return None
        for key in self._idle():
            self.drop(key)
            self.num_evictions += 1
            where = self._take(num_rows)
            if where is not None:
                return where
        raise AssertionError("a stretch that was long enough has gone")

    def _give_back(self, where: BufferSlice) -> None:
        holes = sorted([*self._free, where], key=lambda hole: hole.start)
        joined: list[BufferSlice] = []
        for hole in holes:
            if joined and joined[-1].start + joined[-1].num_rows == hole.start:
                joined[-1] = BufferSlice(joined[-1].start, joined[-1].num_rows + hole.num_rows)
            else:
                joined.append(hole)
        self._free = joined
