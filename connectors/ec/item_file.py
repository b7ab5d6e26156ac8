"""One encoder-cache item as a safetensors file: written by safetensors itself, read straight into the encoder buffer.

    8 bytes   length of the header, little endian
    header    JSON: "__metadata__" (format version, namespace, key, shape, dtype, XXH3-128 of the payload), "embeds"
    payload   [num_embeds, width], row-major

Reading has its own parser because the library's hands out tensors of its own: here the payload is read once, into the
slice where it is wanted, and the checksum is taken over what then stands there.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

FORMAT_VERSION = "1"
_MAX_HEADER_BYTES = 64 * 1024
_CHUNK_BYTES = 1 << 20

#: dtypes that an item may have, and safetensors' names of them.
DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


class ItemError(Exception):
    """An item cannot be used. `damaged`: it never will be, by anyone, so it had better be removed."""

    def __init__(self, reason: str, *, damaged: bool = False) -> None:
        super().__init__(reason)
        self.damaged = damaged


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


_HEADER_DECODER = msgspec.json.Decoder(_Header)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as flat bytes; no copy. (NumPy has no bfloat16, but it has bytes.)"""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def write_item_file(path: Path, embeds: torch.Tensor, namespace: str, key: str) -> None:
    """Write `embeds`, `[num_embeds, width]`, contiguous, in host memory. Raises OSError and safetensors' own errors."""
    metadata = {
        "format_version": FORMAT_VERSION,
        "namespace": namespace,
        "key": key,
        "shape": "x".join(map(str, embeds.shape)),
        "dtype": DTYPES[embeds.dtype],
        "xxh3_128": xxhash.xxh3_128_hexdigest(bytes_of(embeds)),
    }
    try:
        save_file({"embeds": embeds}, path, metadata)
    except SafetensorError as error:
        # The library gives what the system said as words; a full disk is to be as plain as with any other writer.
        system = re.search(r"\(os error (\d+)\)", str(error))
        if system is None:
            raise
        raise OSError(int(system[1]), os.strerror(int(system[1]))) from None


def read_item_file(path: Path, into: torch.Tensor, namespace: str, key: str) -> None:
    """Fill `into`, `[num_embeds, width]`, contiguous, in host memory. Raises ItemError and OSError; what `into` holds
    then is undefined."""
    with open(path, "rb", buffering=0) as file:
        header = _read_header(file, namespace, key)
        expected = (FORMAT_VERSION, DTYPES[into.dtype], tuple(into.shape))
        actual = (header.metadata.format_version, header.embeds.dtype, header.embeds.shape)
        for what, ours, theirs in zip(("format version", "dtype", "shape"), expected, actual, strict=True):
            if ours != theirs:
                raise ItemError(f"{what} of the item is {theirs}, not {ours}")
        payload = bytes_of(into)
        if payload.nbytes != header.embeds.data_offsets[1]:
            raise ItemError("header of the item contradicts itself", damaged=True)
        _read_exactly(file, payload)
        if xxhash.xxh3_128_hexdigest(payload) != header.metadata.xxh3_128:
            raise ItemError("checksum of the item does not match", damaged=True)


def check_item_file(path: Path, namespace: str, key: str) -> None:
    """Read all of the file and raise as `read_item_file` unless it is whole."""
    with open(path, "rb", buffering=0) as file:
        header = _read_header(file, namespace, key)
        checksum = xxhash.xxh3_128()
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
        if checksum.hexdigest() != header.metadata.xxh3_128:
            raise ItemError("checksum of the item does not match", damaged=True)


def _read_header(file: io.FileIO, namespace: str, key: str) -> _Header:
    """Leaves `file` at the payload, whose length is then known to be as the header says."""
    prefix = bytearray(8)
    _read_exactly(file, memoryview(prefix))
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ItemError(f"header of the item claims {header_bytes} bytes", damaged=True)
    raw = bytearray(header_bytes)
    _read_exactly(file, memoryview(raw))
    try:
        header = _HEADER_DECODER.decode(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ItemError(f"header of the item cannot be read: {error}", damaged=True) from None
    if header.metadata.format_version != FORMAT_VERSION:
        raise ItemError(f"format version of the item is {header.metadata.format_version}, not {FORMAT_VERSION}")
    for what, ours, theirs in (("namespace", namespace, header.metadata.namespace), ("key", key, header.metadata.key)):
        if ours != theirs:
            raise ItemError(f"{what} of the item is {theirs:.64}, not {ours}", damaged=True)
    begin, end = header.embeds.data_offsets
    if begin != 0 or end != os.fstat(file.fileno()).st_size - len(prefix) - header_bytes:
        raise ItemError("item is cut short", damaged=True)
    return header


def _read_exactly(file: io.FileIO, into: memoryview) -> None:
    done = 0
    while done < into.nbytes:
        count = file.readinto(into[done:])
        if not count:
            raise ItemError("item is cut short", damaged=True)
        done += count
