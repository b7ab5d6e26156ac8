"""Every block is in one hand, and a freed one is reused last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool


def test_blocks_come_back_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.deallocate([1])
    pool.deallocate([0])
    assert pool.allocate(3) == [3, 1, 0]


@pytest.mark.parametrize("freed", [[2], [0, 0]])
def test_a_block_that_nobody_holds_cannot_be_freed(freed: list[int]) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="freed twice"):
        pool.deallocate(freed)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60))
def test_no_block_is_in_two_hands(moves: list[tuple[int, bool]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    for count, free in moves:
        if free and held:
            pool.deallocate(held.pop(0))
        elif pool.can_allocate(count):
            held.append(pool.allocate(count))
        flat = [block for blocks in held for block in blocks]
        assert len(set(flat)) == len(flat) == pool.num_held
        assert pool.num_free == 8 - len(flat)
