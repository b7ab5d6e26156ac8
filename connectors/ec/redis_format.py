"""How one encoder-cache item lies in Redis: its keys, and the head of its first value.

    triptych:1:{<16 digits of the namespace>:<key>}                   head and first chunk; readers see the item by it
    triptych:1:{<16 digits of the namespace>:<key>}:<token>:<n>       chunk n, from 1 on; 0 while it is being written

    head     8 bytes "TrEC", format version, length of the rest (little endian), then a msgpack array: `ItemHead`
    payload  [num_embeds, width], row-major, cut into chunks of `chunk_bytes`; the last one may be shorter

The braces put all values of an item into one hash slot of a cluster. The token is random and belongs to one writer at
one time, so that writers of the same item never touch each other's chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch

from connectors.ec.store import ItemError

FORMAT_VERSION = 1
MAGIC = b"TrEC"
PREFIX = struct.Struct("<4sHH")
#: Longest head, prefix included. What is longer was not written by us.
MAX_HEAD_BYTES = 960
#: The smallest chunk of an item that has several: it bounds how many a hostile head can make a reader ask for.
MIN_CHUNK_BYTES = 4096

#: dtypes that an item may have, and their names in the head.
DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}

_ITEM_SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
_Digest = Annotated[str, msgspec.Meta(max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class ItemHead(msgspec.Struct, array_like=True, frozen=True):
    """What stands before the payload. Fields are only ever appended."""

    namespace: _Digest
    key: _Digest
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: tuple[_Count, _Count]
    num_bytes: _Count
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=1 << 30)]
    xxh3_128: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]  # of the whole payload
    token: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]

    @property
    def num_chunks(self) -> int:
        return num_chunks(self.num_bytes, self.chunk_bytes)


_DECODER = msgspec.msgpack.Decoder(ItemHead)


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Of a payload; at least one, which an empty payload has too."""
    return max(1, -(-num_bytes // chunk_bytes))


def item_name(namespace: str, key: str) -> bytes:
    """The Redis key that makes the item visible."""
    return f"triptych:1:{{{namespace[:16]}:{key}}}".encode()


def chunk_names(item: bytes, token: bytes, numbers: Sequence[int]) -> list[bytes]:
    """The Redis keys of these chunks of the item that lies, or is to lie, at `item`."""
    prefix = b"%s:%s:" % (item, token.hex().encode())
    return [prefix + b"%d" % number for number in numbers]


def encode_head(head: ItemHead) -> bytes:
    body = msgspec.msgpack.encode(head)
    return PREFIX.pack(MAGIC, FORMAT_VERSION, len(body)) + body


def parse_prefix(raw: bytes) -> int:
    """Length of what follows the 8 bytes `raw`, at most MAX_HEAD_BYTES - 8. Raises ItemError for what is not ours, or
    of another version (which is not damage: somebody newer can read it)."""
    if len(raw) != PREFIX.size:
        raise ItemError("item is cut short", damaged=True)
    magic, version, length = PREFIX.unpack(raw)
    if magic != MAGIC:
        raise ItemError("header of the item cannot be read: something else stands there", damaged=True)
    if version != FORMAT_VERSION:
        raise ItemError(f"format version of the item is {version}, not {FORMAT_VERSION}")
    if length > MAX_HEAD_BYTES - PREFIX.size:
        raise ItemError(f"header of the item claims {length} bytes", damaged=True)
    return int(length)


def parse_body(raw: bytes) -> ItemHead:
    """The rest of the head. Raises ItemError where it cannot be read or contradicts itself."""
    try:
        head = _DECODER.decode(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ItemError(f"header of the item cannot be read: {error}", damaged=True) from None
    if head.shape[0] * head.shape[1] * _ITEM_SIZES.get(head.dtype, 0) != head.num_bytes:
        raise ItemError("header of the item contradicts itself", damaged=True)
    return head


def parse_head(raw: bytes) -> ItemHead:
    """As the two above, from the first MAX_HEAD_BYTES of the value or more."""
    length = parse_prefix(raw[: PREFIX.size])
    return parse_body(raw[PREFIX.size : PREFIX.size + length])


def check_head(head: ItemHead, namespace: str, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ItemError unless the item is the one that is wanted, in the form that is wanted."""
    for what, ours, theirs in (("namespace", namespace, head.namespace), ("key", key, head.key)):
        if ours != theirs:
            raise ItemError(f"{what} of the item is {theirs}, not {ours}", damaged=True)
    if head.dtype != DTYPES[dtype]:
        raise ItemError(f"dtype of the item is {head.dtype}, not {DTYPES[dtype]}")
    if head.shape != shape:
        raise ItemError(f"shape of the item is {head.shape}, not {shape}")
