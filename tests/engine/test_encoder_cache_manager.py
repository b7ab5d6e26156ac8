"""The encoder buffer's accounts: no row in two hands, none lost, and nothing evicted that somebody needs."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connectors.ec.base import BufferSlice
from engine.encoder_cache_manager import EncoderCacheManager

NUM_ROWS = 24
HOLDERS = st.sampled_from(["r1", "r2", "save"])


class EncoderBuffer(RuleBasedStateMachine):
    """A model in plain dictionaries beside the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCacheManager(NUM_ROWS, 8)
        self.items: OrderedDict[str, tuple[BufferSlice, set[str]]] = OrderedDict()  # least recently used first
        self.filling: set[str] = set()
        self.next_key = 0

    def _idle(self) -> list[str]:
        return [key for key, (_, holders) in self.items.items() if key not in self.filling and not holders]

    def _fits(self, num_rows: int, gone: list[str]) -> bool:
        taken = [False] * NUM_ROWS
        for key, (where, _) in self.items.items():
            if key not in gone:
                taken[where.start : where.start + where.num_rows] = [True] * where.num_rows
        return any(not any(taken[i : i + num_rows]) for i in range(NUM_ROWS - num_rows + 1))

    @rule(num_rows=st.integers(1, NUM_ROWS + 2))
    def allocate(self, num_rows: int) -> None:
        key, idle, before = f"k{self.next_key}", self._idle(), self.cache.num_evictions
        self.next_key += 1
        where = self.cache.allocate(key, num_rows)
        if where is None:
            assert not self._fits(num_rows, idle), "room could have been made"
            assert self.cache.num_evictions == before
            return
        # Oldest first, and no more than it takes.
        needed = next(n for n in range(len(idle) + 1) if self._fits(num_rows, idle[:n]))
        assert self.cache.num_evictions - before == needed
        for gone in idle[:needed]:
            del self.items[gone]
        assert where.num_rows == num_rows
        self.items[key] = (where, set())
        self.filling.add(key)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), failed=st.booleans())
    def end_filling(self, data: st.DataObject, failed: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.filling)))
        self.filling.discard(key)
        if failed:
            self.cache.drop(key)
            del self.items[key]
        else:
            self.cache.set_ready(key)
            self.items.move_to_end(key)

    @precondition(lambda self: self.items)
    @rule(data=st.data(), holder=HOLDERS)
    def hold(self, data: st.DataObject, holder: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.items)))
        self.cache.hold(key, holder)
        self.items[key][1].add(holder)
        self.items.move_to_end(key)

    @rule(data=st.data(), holder=HOLDERS)
    def let_go(self, data: st.DataObject, holder: str) -> None:
        key = data.draw(st.sampled_from([*sorted(self.items), "unknown"]))
        self.cache.let_go(key, holder)
        if key in self.items:
            self.items[key][1].discard(holder)

    @invariant()
    def agree(self) -> None:
        rows: set[int] = set()
        for key, (where, _) in self.items.items():
            assert self.cache.where(key) == where
            assert self.cache.is_filling(key) == (key in self.filling)
            assert self.cache.is_ready(key) == (key not in self.filling)
            taken = set(range(where.start, where.start + where.num_rows))
            assert taken <= set(range(NUM_ROWS))
            assert not taken & rows, "a row in two hands"
            rows |= taken
        assert self.cache.num_items == len(self.items)
        held = sum(w.num_rows for key, (w, holders) in self.items.items() if holders or key in self.filling)
        assert self.cache.bytes_held == 8 * held

    @invariant()
    def holes_are_joined_and_none_is_lost(self) -> None:
        holes = self.cache._free
        assert sum(hole.num_rows for hole in holes) + sum(w.num_rows for w, _ in self.items.values()) == NUM_ROWS
        assert all(a.start + a.num_rows < b.start for a, b in pairwise(holes))


TestEncoderBuffer = EncoderBuffer.TestCase


def test_a_buffer_without_rows_takes_nothing() -> None:
    cache = EncoderCacheManager(0, 8)
    assert cache.allocate("k", 1) is None
    assert cache.bytes_held == 0
