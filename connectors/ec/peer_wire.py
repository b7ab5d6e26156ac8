"""What ECPeerConnector puts on the wire and into item sources.

    consumer (DEALER)                         producer (ROUTER)
    Hello  version, namespace           ->    Welcome  version, namespace, instance
                                              Refused  why; nothing else follows
    Ask    keys and their tokens        ->    Found    for each whether it is held
    Open   an item                      ->    Item     its shape, a checksum for each chunk, and chunk 0 as a frame
                                              Failed   reason
    Pull   a chunk of it                ->    Chunk    which, and the frame
                                              Failed   reason
    Done   all of it arrived            ->    (its lease ends)

Answers come in the order of their questions. Headers are msgpack; chunks, of CHUNK_BYTES but for the last one, are
frames of their own. The token that every question carries is what entitles to an answer. It is made from the key and a
secret of the producer's life, so a producer that was started again honours none of the old ones. Everything decoded
here comes from the network; types, ranges and sizes are checked by the decoder.

A bound that ZeroMQ cannot give: it gathers all frames of a message before it hands out the first, and limits the size
of each frame but not their number. The port belongs on a network of the cluster's own.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated, NamedTuple

import msgspec
import torch

from connectors.ec.base import MAX_SOURCE_CHARS
from connectors.peer_messages import Sequence, Token, decode

WIRE_VERSION = 1
#: Most keys of one Ask, and most chunks of one item: a header must hold them.
MAX_KEYS = 256
MAX_CHUNKS = 3000

_SOURCE = re.compile(
    r"(?P<address>tcp://(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[1-9][0-9]{0,4}))"
    r"/(?P<instance>[0-9a-f]{32})/(?P<token>[0-9a-f]{32})"
)

Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Reason = Annotated[str, msgspec.Meta(max_length=512)]
Checksum = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]  # XXH3-128
ChunkIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class Source(NamedTuple):
    """Where a consumer can have an item: `tcp://host:port/instance/token`."""

    address: str
    instance: str  # 32 hexadecimal digits; the producer's life
    token: str

    def __str__(self) -> str:
        return "/".join(self)


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=True):
    version: int
    namespace: Digest


class Ask(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    items: Annotated[list[tuple[Digest, Token]], msgspec.Meta(max_length=MAX_KEYS)]


class Open(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    key: Digest
    token: Token


class Pull(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    key: Digest
    token: Token
    index: ChunkIndex
    again: bool = False  # it came damaged before: is the item itself still whole?


class Done(msgspec.Struct, array_like=True, frozen=True, tag=True):
    key: Digest
    token: Token


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=True):
    version: int
    namespace: Digest
    instance: Token


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    reason: Reason


class Found(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    found: Annotated[list[bool], msgspec.Meta(max_length=MAX_KEYS)]


class Item(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    key: Digest
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: tuple[Size, Size]
    checksums: Annotated[list[Checksum], msgspec.Meta(min_length=1, max_length=MAX_CHUNKS)]


class Chunk(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    index: ChunkIndex


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    reason: Reason


Request = Hello | Ask | Open | Pull | Done
Answer = Found | Item | Chunk | Failed
Reply = Welcome | Refused | Answer

_ENCODER = msgspec.msgpack.Encoder()
_REQUEST_DECODER: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY_DECODER: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def new_instance() -> str:
    """The name of one producer's life: 128 random bits."""
    return secrets.token_hex(16)


def token_of(secret: bytes, key: str) -> str:
    """What entitles to one item: 128 bits that nobody can make who does not have the secret of 32 bytes."""
    return hashlib.blake2b(key.encode(), key=secret, digest_size=16).hexdigest()


def parse_source(text: str) -> Source | None:
    """None for what is not a source of ours."""
    match = _SOURCE.fullmatch(text) if len(text) <= MAX_SOURCE_CHARS else None
    if match is None or int(match["port"]) > 65535:
        return None
    return Source(match["address"], match["instance"], match["token"])


def encode(message: Request | Reply) -> bytes:
    return _ENCODER.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises MalformedError."""
    return decode(_REQUEST_DECODER, frame)


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Raises MalformedError."""
    return decode(_REPLY_DECODER, frame)
