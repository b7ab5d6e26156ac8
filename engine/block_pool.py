"""KV blocks by number: who refers to them, what is known to be in them, which is given away next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Fixed number of blocks, each with a count of references. Step thread only.

    A block whose content is known (a full one, under its prefix hash) keeps it after the last reference has gone, until
    the block is given to somebody else: those unused for longest first. So a block that was just freed, which a late
    reader of its bytes might still look at, is the last to be reused.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._cached: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to, cached content or not."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks with known content, held or not."""
        return len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of unknown content, one reference each. The caller has asked `can_allocate`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these cached blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def deallocate(self, blocks: Sequence[int]) -> None:
        """One reference less to each. The last blocks of a sequence are reused before its first, which more requests
        may share. Raises ValueError for a block that nobody holds: its next owner would share it."""
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is freed twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None

    # ---- what is in them ----

    def find(self, prefix_hash: bytes) -> int | None:
        """The block with this content, if there is one."""
        return self._cached.get(prefix_hash)

    def remember(self, block: int, prefix_hash: bytes) -> None:
        """What a held block holds now. Where another one holds the same, that one stays the known one."""
        if prefix_hash not in self._cached:
            self._forget(block)
            self._cached[prefix_hash] = block
            self._hash_of[block] = prefix_hash

    def _forget(self, block: int) -> None:
        prefix_hash = self._hash_of.pop(block, None)
        if prefix_hash is not None:
            del self._cached[prefix_hash]
