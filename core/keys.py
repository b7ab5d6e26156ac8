"""Content hashes, the namespace digest, and item keys: all BLAKE3, all 256 bits wide.

An item's key is a pure function of the image's bytes, the namespace (modality, weights, preprocessing, dtype) and the
tenant, so router, encoder and prefill derive the same key by themselves, and nothing that a client names is part of it.
"""

from __future__ import annotations

import struct

from blake3 import blake3

from core.types import IMAGE

DIGEST_BYTES = 32
KEY_LENGTH = 2 * DIGEST_BYTES
_KEY_VERSION = b"triptych item key 1"
_NAMESPACE_VERSION = b"triptych namespace 1"


def content_hash(data: bytes) -> bytes:
    """BLAKE3 of an image file's bytes, 32 bytes."""
    return blake3(data).digest()


def _digest(parts: list[bytes]) -> str:
    # Each part goes in behind its length, so that no two lists of parts run together to the same bytes.
    hasher = blake3()
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.hexdigest()


def namespace_digest(*, weights: str, preprocessing: str, dtype: str, modality: str = IMAGE) -> str:
    """Digest that tells apart embeddings which must never be mixed, 64 hexadecimal digits.

    `weights` is `engine.models.digest.weights_digest`; `preprocessing` the image processor's class and configuration as
    canonical JSON.
    """
    return _digest([_NAMESPACE_VERSION, modality.encode(), weights.encode(), preprocessing.encode(), dtype.encode()])


def item_key(content: bytes, namespace: str, tenant: str = "") -> str:
    """Key of one image's embeddings in the encoder cache, 64 hexadecimal digits."""
    if len(content) != DIGEST_BYTES:
        raise ValueError(f"content hash has {len(content)} bytes, not {DIGEST_BYTES}")
    return _digest([_KEY_VERSION, content, namespace.encode(), tenant.encode()])
