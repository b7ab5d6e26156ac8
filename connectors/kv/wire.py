"""What KVPeerConnector puts on the wire (`stream.py`) and into handles: msgpack headers, and the bytes of blocks.

    consumer                             producer
    Hello    version, layout     ->      Welcome  version, layout
                                         Refused  both layouts; nothing else follows
    Renew    the lease is wanted ->      (the lease goes on)
    Pull     blocks of a lease   ->      Rows     checksums; the blocks are the message's body
                                         Failed   reason
    Pull     mapped              ->      Places   checksums, and where in the producer's shared memory they are
    Ack      all of it arrived   ->      (the lease ends)
    Release  not wanted any more ->      (the lease ends)

A consumer on the same host asks for Places only where the producer's board does not tell (`board.py`). A Pull may be
repeated, whole or in other pieces, for as long as the lease lasts: that is how a consumer resumes after a lost or
damaged message, over the same connection or a new one.

The token that every request carries is what entitles it: handles pass through the front door, lease names can be
guessed. Everything decoded here comes from the network; types, ranges and sizes are checked by the decoder. Nothing is
encrypted: the port belongs on a network of the cluster's own.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec

from connectors.kv.base import KVLayout
from connectors.peer_messages import MalformedError, Sequence, Token, decode
from core.errors import IncompatibleError, InvalidRequestError
from core.types import KVHandle

WIRE_VERSION = 4
MAX_PARAMS_BYTES = 8 * 1024
#: Most blocks that one message may bring.
MAX_BLOCKS_PER_MESSAGE = 1024

_ADDRESS_PATTERN = r"\Atcp://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}\Z"

RequestId = Annotated[str, msgspec.Meta(max_length=1024)]
Reason = Annotated[str, msgspec.Meta(max_length=8192)]
#: XXH3-128, big-endian, of each grain of the blocks (`BlockRows.grain`) in the order asked for, end to end.
Checksums = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16 * MAX_BLOCKS_PER_MESSAGE)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=True):
    version: int
    layout: KVLayout


class Renew(msgspec.Struct, array_like=True, frozen=True, tag=True):
    lease: RequestId
    token: Token


class Pull(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Blocks [first, first + count) of the lease, in the order of its block list."""

    sequence: Sequence
    lease: RequestId
    token: Token
    first: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS_PER_MESSAGE)]
    mapped: bool  # the consumer reads the producer's shared memory itself: answer with Places


class Ack(msgspec.Struct, array_like=True, frozen=True, tag=True):
    lease: RequestId
    token: Token


class Release(msgspec.Struct, array_like=True, frozen=True, tag=True):
    lease: RequestId
    token: Token


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=True):
    version: int
    layout: KVLayout


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=True):
    reason: Reason


class Rows(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    checksums: Checksums


class Places(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    checksums: Checksums
    block_ids: Annotated[list[BlockId], msgspec.Meta(max_length=MAX_BLOCKS_PER_MESSAGE)]  # of the producer's cache


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    sequence: Sequence
    reason: Reason
    given_up: bool  # the router gave the lease up: nobody waits for this pull any more


Request = Hello | Renew | Pull | Ack | Release
Reply = Welcome | Refused | Rows | Places | Failed


class HandleParams(msgspec.Struct, frozen=True):
    """KVHandle.params, as a msgpack map."""

    version: int
    address: Annotated[str, msgspec.Meta(pattern=_ADDRESS_PATTERN)]
    instance: Annotated[str, msgspec.Meta(max_length=256)]
    request_id: RequestId
    token: Token
    layout: KVLayout
    num_blocks: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]  # the lease ends if nobody renews it for so long
    host: Annotated[str, msgspec.Meta(max_length=300)]  # the producer's, for people
    segment: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{32})?\Z")]  # name of its shared memory; "": none


_ENCODER = msgspec.msgpack.Encoder()
_REQUEST_DECODER: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY_DECODER: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_PARAMS_DECODER = msgspec.msgpack.Decoder(HandleParams)


def new_token() -> str:
    """128 random bits."""
    return secrets.token_hex(16)


def encode(message: Request | Reply | HandleParams) -> bytes:
    return _ENCODER.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """Raises MalformedError."""
    return decode(_REQUEST_DECODER, frame)


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Raises MalformedError."""
    return decode(_REPLY_DECODER, frame)


def decode_handle(handle: KVHandle, connector: str) -> HandleParams:
    """The parameters of a handle that a connector class named `connector` made. Raises InvalidRequestError, or
    IncompatibleError where another version of the connector made it."""
    if handle.connector != connector:
        raise InvalidRequestError(f"the KV handle is of connector {handle.connector!r:.100}, not {connector!r}")
    try:
        params = decode(_PARAMS_DECODER, handle.params, MAX_PARAMS_BYTES)
    except MalformedError as error:
        _check_version(_version_of(handle.params))
        raise InvalidRequestError(f"the KV handle cannot be read: {error}") from None
    if params.num_tokens != handle.num_tokens:
        raise InvalidRequestError(
            f"the KV handle contradicts itself: {handle.num_tokens} tokens outside, {params.num_tokens} inside"
        )
    if params.num_tokens > params.num_blocks * params.layout.block_size:
        raise InvalidRequestError(
            f"the KV handle contradicts itself: {params.num_tokens} tokens in {params.num_blocks} blocks"
        )
    return params


def check_layout(version: int, ours: KVLayout, theirs: KVLayout) -> None:
    """Raise IncompatibleError, with both values, unless blocks mean the same on both ends."""
    _check_version(version)
    if theirs != ours:
        raise IncompatibleError("KV block layout", ours.describe(), theirs.describe())


def _check_version(version: int) -> None:
    if version != WIRE_VERSION:
        raise IncompatibleError("version of the KV wire protocol", WIRE_VERSION, version)


class _Versioned(msgspec.Struct, frozen=True):
    """What a handle of any version has."""

    version: int = WIRE_VERSION


_VERSION_DECODER = msgspec.msgpack.Decoder(_Versioned)


def _version_of(params: bytes) -> int:
    try:
        return decode(_VERSION_DECODER, params, MAX_PARAMS_BYTES).version
    except MalformedError:
        return WIRE_VERSION
