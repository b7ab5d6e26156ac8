"""Which request holds which KV blocks, how many more it needs, and which it need not compute."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.prefix_hash import extend_hashes, root_hash
from engine.request import Request


class KVCacheManager:
    """Grows, shares and frees requests' block lists. Step thread only.

    A request's blocks are, in order: computed ones (by itself, or pulled), of which a prefix may be shared with other
    requests, then new ones that the next step writes to. Shared blocks are full and never written to.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self._leased: dict[str, list[int]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- prefix cache ----

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The longest run of cached blocks that the request's tokens begin with. Takes no reference. Never all of its
        tokens: the last one is always computed, since its logits are wanted."""
        if not self.prefix_caching or not self.pool.num_cached:
            return []
        blocks: list[int] = []
        for prefix_hash in self._hashes(request)[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.find(prefix_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take_computed_blocks(self, request: Request) -> int:
        """Give a request that holds no blocks its cached ones. Returns how many tokens they are."""
        assert not request.block_ids
        blocks = self.get_computed_blocks(request)
        self.pool.share(blocks)
        request.block_ids.extend(blocks)
        request.num_known_blocks = len(blocks)
        return len(blocks) * self.block_size

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens' keys and values are in the request's blocks: let others find the full ones."""
        num_full = num_tokens // self.block_size
        if num_full <= request.num_known_blocks or not self.prefix_caching:
            return
        hashes = self._hashes(request)
        for i in range(request.num_known_blocks, num_full):
            self.pool.remember(request.block_ids[i], hashes[i])
        request.num_known_blocks = num_full

    def _hashes(self, request: Request) -> list[bytes]:
        num_tokens = request.num_tokens
        if len(request.block_hashes) < num_tokens // self.block_size:
            if not request.root_hash:
                request.root_hash = root_hash(request.tenant)
            tokens = request.prompt_token_ids
            if num_tokens > len(tokens):
                tokens = tokens + request.output_token_ids
            extend_hashes(request.block_hashes, request.root_hash, tokens, request.features, self.block_size)
        return request.block_hashes

    # ---- blocks ----

    def allocate_slots(self, request: Request, num_tokens: int, num_lookahead_tokens: int = 0) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens, whether they are to be computed or pulled, and for
        `num_lookahead_tokens` beyond. Returns the new blocks (perhaps none), or None where the pool has too few and
        nothing was changed."""
        needed = self.num_blocks_for(num_tokens + num_lookahead_tokens) - len(request.block_ids)
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
        request.num_known_blocks = 0

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
