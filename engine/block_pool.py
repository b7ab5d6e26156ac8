"""KV blocks by number: who has them, who may have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BlockPool:
    """Fixed number of blocks, each free or held by exactly one owner. Step thread only.

    Blocks are handed out in the order in which they were freed, so that a block which was just freed (and which a late
    reader of its bytes might still look at) is the last to be reused.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._held = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks. The caller has asked `can_allocate`."""
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._held[block] = 1
        return blocks

    def deallocate(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Raises ValueError for a block that nobody holds: its next owner would share it."""
        for block in blocks:
            if not self._held[block]:
                raise ValueError(f"block {block} is freed twice")
            self._held[block] = 0
        self._free.extend(blocks)
