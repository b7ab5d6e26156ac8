"""One encoder-cache item as a safetensors file, which any reader of that format reads; written and read chunk by chunk.

    8 bytes   length of the header, little endian
    header    JSON: "__metadata__" (format version, namespace, key, shape, dtype, XXH3-128 of the payload), "embeds";
              filled up with spaces so that the payload begins at a multiple of 64, as tensors in memory do: between
              places that are aligned alike the system copies up to twice as fast
    payload   [num_embeds, width], row-major

The library has its own writer and reader. The writer wants a second pass for the checksum and gives its files a mode of
its own; the reader hands out tensors of its own. Here the payload goes straight out of and into the memory where it is
wanted, and each chunk is added to the checksum while it is still in the core's cache.

All functions take an open file and block on it; any thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import msgspec
import torch
import xxhash

from connectors.ec.store import CHUNK_BYTES, ItemError, LoadTarget, bytes_of

FORMAT_VERSION = "1"
#: Prefix and header of a file that we write never take more.
MAX_OVERHEAD_BYTES = 1024
_MAX_HEADER_BYTES = 64 * 1024
_PREFIX_BYTES = 8
_ALIGNMENT = 64
_NO_CHECKSUM = "?" * 32

#: dtypes that an item may have, and safetensors' names of them.
DTYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class _Embeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, int]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct, frozen=True):
    format_version: str
    namespace: str
    key: str
    shape: str
    dtype: str
    xxh3_128: str


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    embeds: _Embeds
    metadata: _Metadata = msgspec.field(name="__metadata__")


class _AnyVersion(msgspec.Struct, frozen=True):
    format_version: str


class _AnyHeader(msgspec.Struct, frozen=True):
    """What every version of the format has in common."""

    metadata: _AnyVersion = msgspec.field(name="__metadata__")


_HEADER_DECODER = msgspec.json.Decoder(_Header)
_VERSION_DECODER = msgspec.json.Decoder(_AnyHeader)


class _Staging(threading.local):
    """One chunk a thread. A fresh one for each item would cost a small item more than its copy does: the system has to
    find and clear the pages."""

    def __init__(self) -> None:
        self.chunk = memoryview(bytearray(CHUNK_BYTES))


_STAGING = _Staging()


def write_item_file(fd: int, embeds: torch.Tensor, namespace: str, key: str, check: Callable[[], None]) -> int:
    """Write `embeds`, `[num_embeds, width]`, contiguous, in host memory, to an empty file; return the file's bytes.

    `check` is called before each chunk and may raise. The header, which holds the checksum, comes last: until then the
    file begins with zeros, which no reader takes. Raises OSError.
    """
    data = bytes_of(embeds)
    head = _file_head(embeds, namespace, key)
    offset = len(head)
    checksum = xxhash.xxh3_128()
    for begin in range(0, data.nbytes, CHUNK_BYTES):
        check()
        chunk = data[begin : begin + CHUNK_BYTES]
        checksum.update(chunk)
        _write_all(fd, chunk, offset + begin)
    _write_all(fd, memoryview(head.replace(_NO_CHECKSUM.encode(), checksum.hexdigest().encode())), 0)
    return offset + data.nbytes


def read_item_file(
    fd: int, target: LoadTarget, namespace: str, key: str, check: Callable[[], None], *, in_memory: bool = False
) -> None:
    """Fill `target`. `check` is called before each chunk and may raise. `in_memory`: reading this file cannot hang, so
    the target may be read into, which saves a copy. Raises ItemError, OSError, and AbandonedError once the time limit
    is over."""
    header, offset = _read_header(fd, namespace, key)
    expected = (DTYPES[target.dtype], target.shape)
    actual = (header.embeds.dtype, header.embeds.shape)
    for what, ours, theirs in zip(("dtype", "shape"), expected, actual, strict=True):
        if ours != theirs:
            raise ItemError(f"{what} of the item is {theirs}, not {ours}")
    if target.num_bytes != header.embeds.data_offsets[1]:
        raise ItemError("header of the item contradicts itself", damaged=True)
    checksum = xxhash.xxh3_128()
    for begin in range(0, target.num_bytes, CHUNK_BYTES):
        check()
        num_bytes = min(CHUNK_BYTES, target.num_bytes - begin)
        if in_memory:
            checksum.update(target.fill(begin, num_bytes, partial(_read_all, fd, offset=offset + begin)))
            continue
        chunk = _STAGING.chunk[:num_bytes]
        _read_all(fd, chunk, offset + begin)
        checksum.update(chunk)
        target.write(chunk, begin)
    if checksum.hexdigest() != header.metadata.xxh3_128:
        raise ItemError("checksum of the item does not match", damaged=True)


def check_item_file(fd: int, namespace: str, key: str, check: Callable[[], None]) -> None:
    """Read all of the file and raise as `read_item_file` unless it is whole."""
    header, offset = _read_header(fd, namespace, key)
    num_bytes = header.embeds.data_offsets[1]
    checksum = xxhash.xxh3_128()
    for begin in range(0, num_bytes, CHUNK_BYTES):
        check()
        chunk = _STAGING.chunk[: min(CHUNK_BYTES, num_bytes - begin)]
        _read_all(fd, chunk, offset + begin)
        checksum.update(chunk)
    if checksum.hexdigest() != header.metadata.xxh3_128:
        raise ItemError("checksum of the item does not match", damaged=True)


def _file_head(embeds: torch.Tensor, namespace: str, key: str) -> bytes:
    """Prefix and header, with `_NO_CHECKSUM` where the checksum, of the same length, is to come."""
    rows, width = embeds.shape
    dtype = DTYPES[embeds.dtype]
    header = _Header(
        _Embeds(dtype, (rows, width), (0, embeds.nbytes)),
        _Metadata(FORMAT_VERSION, namespace, key, f"{rows}x{width}", dtype, _NO_CHECKSUM),
    )
    text = msgspec.json.encode(header)
    text += b" " * (-(_PREFIX_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text


def _read_header(fd: int, namespace: str, key: str) -> tuple[_Header, int]:
    """The header and where the payload begins, whose length is then known to be as the header says."""
    prefix = bytearray(_PREFIX_BYTES)
    _read_all(fd, memoryview(prefix), 0)
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ItemError(f"header of the item claims {header_bytes} bytes", damaged=True)
    raw = bytearray(header_bytes)
    _read_all(fd, memoryview(raw), _PREFIX_BYTES)
    try:
        version = _VERSION_DECODER.decode(raw).metadata.format_version
        if version != FORMAT_VERSION:  # whole, for those who know that version: not damaged
            raise ItemError(f"format version of the item is {version[:16]!r}, not {FORMAT_VERSION!r}")
        header = _HEADER_DECODER.decode(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ItemError(f"header of the item cannot be read: {error}", damaged=True) from None
    for what, ours, theirs in (("namespace", namespace, header.metadata.namespace), ("key", key, header.metadata.key)):
        if ours != theirs:
            raise ItemError(f"{what} of the item is {theirs[:64]!r}, not {ours!r}", damaged=True)
    begin, end = header.embeds.data_offsets
    payload = _PREFIX_BYTES + header_bytes
    if begin != 0 or end != os.fstat(fd).st_size - payload:
        raise ItemError("item is cut short", damaged=True)
    return header, payload


def _read_all(fd: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise ItemError("item is cut short", damaged=True)
        done += count


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], offset + done)
