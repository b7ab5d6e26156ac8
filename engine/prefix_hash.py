"""Names for the content of full KV blocks: two blocks of one name hold the same keys and values.

The name of a block covers everything that its keys and values depend on: all tokens up to its end, and, since an
image's placeholder tokens are all alike, the key and place of every image among them (the key covers pixels, weights,
preprocessing and tenant). It is chained, so it takes in one block at a time:

    root     = BLAKE3(salt of the tenant, adapter), each behind its length
    block i  = BLAKE3(block i-1, tokens of block i, [image key, its offset from the block's start] of each image in it)

The idea of chained block hashes is vLLM's (`v1/core/kv_cache_utils.py`). 256 bits, never cut: a collision would answer
one tenant from another's text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from blake3 import blake3

from core.types import PlacedFeature


def root_hash(salt: str, adapter: str = "") -> bytes:
    """What the first block is chained to. Tenants share nothing unless their salts are equal, and nothing is shared
    between adapters of the weights, "" for none; the engine serves none yet."""
    content = bytearray()
    for part in (b"triptych kv prefix 2", salt.encode(), adapter.encode()):
        content += len(part).to_bytes(8, "little") + part
    return blake3(content).digest()


def extend_hashes(
    hashes: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    features: Sequence[PlacedFeature],
    block_size: int,
) -> None:
    """Append to `hashes`, which holds those of the first `len(hashes)` blocks, the ones of all further full blocks of
    `token_ids`. `features` stand in order of their offsets."""
    for i in range(len(hashes), len(token_ids) // block_size):
        begin, end = i * block_size, (i + 1) * block_size
        content = bytearray(hashes[i - 1] if i else root)
        content += array("I", token_ids[begin:end]).tobytes()
        for placed in features:
            if placed.offset >= end:
                break
            if placed.end > begin:
                content += placed.feature.key.encode()
                content += (placed.offset - begin).to_bytes(8, "little", signed=True)
        hashes.append(blake3(content).digest())
