"""Which request holds which KV blocks, and how many more it needs."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.request import Request


class KVCacheManager:
    """Grows and frees requests' block lists. Step thread only."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._leased: dict[str, list[int]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate_slots(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens. Returns the new blocks (perhaps none), or None where
        the pool has too few and nothing was changed."""
        needed = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if needed <= 0:
            return []
        if not self.pool.can_allocate(needed):
            return None
        blocks = self.pool.allocate(needed)
        request.block_ids.extend(blocks)
        return blocks

    def free(self, request: Request) -> None:
        """Take all blocks from a request. Idempotent."""
        if request.block_ids:
            self.pool.deallocate(request.block_ids)
            request.block_ids = []

    def lease(self, request: Request) -> None:
        """Move a request's blocks from it to its lease, where they outlive it."""
        self._leased[request.request_id] = request.block_ids
        request.block_ids = []

    def end_lease(self, request_id: str) -> None:
        """Free a lease's blocks."""
        self.pool.deallocate(self._leased.pop(request_id))

    @property
    def num_leases(self) -> int:
        return len(self._leased)

    def has_lease(self, request_id: str) -> bool:
        return request_id in self._leased
