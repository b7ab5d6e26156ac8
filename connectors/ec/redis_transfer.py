"""One item over one connection to Redis: sent chunk by chunk, published, received piece by piece.

Sending: the chunks go to names that carry a random token and expire within moments, so that what a dying writer leaves
behind goes away by itself. When all of them are acknowledged, one transaction gives them their real time to live and
renames the first one to the name by which readers see the item, unless somebody else's item is there by then.

Receiving: the first chunk, with the head, takes one round trip, and most items have no more. The others are asked for
some megabytes ahead. Each GET renews the time to live; that of the other chunks is longer, so that none of them goes
before the item does.

All of it blocks, and raises UnreachableError and ServerError besides what is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash

from connectors.ec.redis_errors import ServerError, UnreachableError
from connectors.ec.redis_format import (
    DTYPES,
    PREFIX,
    ItemHead,
    check_head,
    chunk_names,
    encode_head,
    item_name,
    num_chunks,
    parse_body,
    parse_prefix,
)
from connectors.ec.redis_link import BulkReplies, Command, Link
from connectors.ec.store import ItemError, SaveSource

#: Chunks are asked for so far ahead of the one that is read.
_AHEAD_BYTES = 4 << 20
#: Chunks sent before the reply to the first of them is waited for.
_UNACKNOWLEDGED = 2


class ItemWanted(NamedTuple):
    """The item that a reader expects."""

    namespace: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def name(self) -> bytes:
        return item_name(self.namespace, self.key)


class Lifetimes(NamedTuple):
    """Times to live, in milliseconds."""

    item: int  # from its last use
    chunk: int  # of what the item names; longer
    staged: int  # of what is being written


class DamagedError(ItemError):
    """With what stands there instead of a good item: the beginning of the value, None where it is no string."""

    def __init__(self, reason: str, seen: bytes | None) -> None:
        super().__init__(reason, damaged=True)
        self.seen = seen


def receive_item(link: Link, wanted: ItemWanted, lifetimes: Lifetimes, take: Callable[[memoryview], None]) -> ItemHead:
    """Hand the payload to `take`, in order; what it was handed is good only if this returns. Raises ItemError, a
    DamagedError where the item had better be removed."""
    checksum = xxhash.xxh3_128()

    def take_and_check(piece: memoryview) -> None:
        checksum.update(piece)
        take(piece)

    link.send([(b"GETEX", wanted.name, b"PX", b"%d" % lifetimes.item)])
    replies = link.bulk_replies()
    length = _begin(replies)
    if length is None:
        raise ItemError("item is not in the store")
    seen = replies.take(PREFIX.size)
    try:
        seen += replies.take(parse_prefix(seen))
        head = parse_body(seen[PREFIX.size :])
        check_head(head, wanted.namespace, wanted.key, wanted.dtype, wanted.shape)
        if length != len(seen) + min(head.num_bytes, head.chunk_bytes):
            raise ItemError("item is cut short", damaged=True)
        _receive_payload(link, replies, wanted.name, head, lifetimes.chunk, take_and_check)
        if checksum.digest() != head.xxh3_128:
            raise ItemError("checksum of the item does not match", damaged=True)
    except ItemError as error:
        if error.damaged:
            raise DamagedError(str(error), seen) from None
        raise
    return head


def send_item(
    link: Link,
    item: ItemWanted,
    token: bytes,
    chunk_bytes: int,
    lifetimes: Lifetimes,
    source: SaveSource,
) -> bool:
    """Whether the item is visible now by this call: False where one is visible there already. Raises AbandonedError.
    Unless it returns True, `staged_names` are to be removed."""
    names = staged_names(item.name, token, source.embeds.nbytes, chunk_bytes)
    data = source.data
    # The first chunk goes last, since the head has the checksum of all.
    checksum = xxhash.xxh3_128(data[:chunk_bytes])
    for number in range(1, len(names)):
        chunk = data[number * chunk_bytes : (number + 1) * chunk_bytes]
        checksum.update(chunk)
        if number > _UNACKNOWLEDGED:
            _acknowledged(link)
        source.check()
        link.send_set(names[number], [chunk], lifetimes.staged)
    rows, width = item.shape
    dtype, digest = DTYPES[item.dtype], checksum.digest()
    head = ItemHead(item.namespace, item.key, dtype, (rows, width), data.nbytes, chunk_bytes, digest, token)
    link.send_set(names[0], [encode_head(head), data[:chunk_bytes]], lifetimes.staged)
    for _ in range(min(len(names) - 1, _UNACKNOWLEDGED) + 1):
        _acknowledged(link)
    source.check()
    return _publish(link, item.name, names, lifetimes)


def staged_names(item: bytes, token: bytes, num_bytes: int, chunk_bytes: int) -> list[bytes]:
    """Where the chunks of an item lie while it is being written."""
    return chunk_names(item, token, range(num_chunks(num_bytes, chunk_bytes)))


def _receive_payload(
    link: Link,
    replies: BulkReplies,
    item: bytes,
    head: ItemHead,
    ttl_ms: int,
    take: Callable[[memoryview], None],
) -> None:
    """All chunks, the rest of the first one to begin with: the next ones are asked for before it is read."""
    if head.num_chunks == 1:  # as most items have
        replies.stream(head.num_bytes, take)
        return
    names = chunk_names(item, head.token, range(1, head.num_chunks))
    ahead = max(2, _AHEAD_BYTES // head.chunk_bytes)
    ttl = b"%d" % ttl_ms
    num_asked = 0
    left = head.num_bytes
    for number in range(head.num_chunks):
        # Half of them at a time, so that there are few packets and the server never runs dry.
        if num_asked < len(names) and num_asked - number <= ahead // 2:
            more = names[num_asked : number + ahead]
            link.send([(b"GETEX", name, b"PX", ttl) for name in more])
            num_asked += len(more)
        expected = min(left, head.chunk_bytes)
        if number and _begin(replies) != expected:
            raise ItemError("item is cut short: one of its chunks is gone or of another length", damaged=True)
        replies.stream(expected, take)
        left -= expected


def _publish(link: Link, item: bytes, names: Sequence[bytes], lifetimes: Lifetimes) -> bool:
    """Make the item visible, which is so small a command that the time limit cannot pass while it is sent."""
    ttl, chunk_ttl = b"%d" % lifetimes.item, b"%d" % lifetimes.chunk
    commands: list[Command] = [(b"MULTI",)]
    commands += [(b"PEXPIRE", name, chunk_ttl) for name in names[1:]]
    commands += [(b"PEXPIRE", names[0], ttl), (b"RENAMENX", names[0], item), (b"EXEC",)]
    done = link.ask(*commands)[-1]
    if not isinstance(done, list) or len(done) != len(names) + 1:
        raise UnreachableError("what answers does not speak Redis's protocol")
    *kept, renamed = done
    if renamed == 0:
        return False
    if renamed == 1 and all(result == 1 for result in kept):
        return True
    if renamed == 1:
        link.ask((b"UNLINK", item))
    reason = "Redis evicted parts of the item while it was being written: its maxmemory is too small"
    raise ServerError(reason, "EVICTED")


def _begin(replies: BulkReplies) -> int | None:
    try:
        return replies.begin()
    except ServerError as error:
        if error.code == "WRONGTYPE":
            raise DamagedError("header of the item cannot be read: something else stands there", None) from None
        raise


def _acknowledged(link: Link) -> None:
    reply = link.receive()
    if isinstance(reply, ServerError):
        raise reply
