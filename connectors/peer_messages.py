"""What the two peer connectors' wire formats have in common: msgpack headers, bounded and checked by their decoders."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

#: Largest header that either end takes; nothing that a consumer sends is longer.
MAX_HEADER_BYTES = 64 * 1024

Token = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]  # 128 random bits
Sequence = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

T = TypeVar("T")


class MalformedError(Exception):
    """Bytes from the network that are not a message of ours."""


def decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview, max_bytes: int = MAX_HEADER_BYTES) -> T:
    """Raises MalformedError."""
    if len(frame) > max_bytes:
        raise MalformedError(f"{len(frame)} bytes are more than {max_bytes}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedError(str(error)) from None
