"""One encoder-cache item as a safetensors file: written by safetensors itself, read straight into the encoder buffer.

    8 bytes   length of the header, little endian
    header    JSON: "__metadata__" (format version, namespace, key, shape, dtype, XXH3-128 of the payload), "embeds"
    payload   [num_embeds, width], row-major

Reading has its own parser because the library's hands out tensors of its own: here the payload goes to the slice where
it is wanted, chunk by chunk, and each chunk is added to the checksum while it is still in the core's cache.
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

from connectors.ec.store import CHUNK_BYTES, ItemError, LoadTarget, bytes_of

FORMAT_VERSION = "1"
_MAX_HEADER_BYTES = 64 * 1024

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


_HEADER_DECODER = msgspec.json.Decoder(_Header)


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


def read_item_file(path: Path, target: LoadTarget, namespace: str, key: str) -> None:
    """Fill `target`. Raises ItemError, OSError, and AbandonedError once the time limit is over."""
    with open(path, "rb", buffering=0) as file:
        header = _read_header(file, namespace, key)
        expected = (DTYPES[target.dtype], target.shape)
        actual = (header.embeds.dtype, header.embeds.shape)
        for what, ours, theirs in zip(("dtype", "shape"), expected, actual, strict=True):
            if ours != theirs:
                raise ItemError(f"{what} of the item is {theirs}, not {ours}")
        if target.num_bytes != header.embeds.data_offsets[1]:
            raise ItemError("header of the item contradicts itself", damaged=True)
        checksum = xxhash.xxh3_128()
        staging = memoryview(bytearray(min(CHUNK_BYTES, target.num_bytes)))
        for offset in range(0, target.num_bytes, CHUNK_BYTES):
            chunk = staging[: min(CHUNK_BYTES, target.num_bytes - offset)]
            _read_exactly(file, chunk)
            checksum.update(chunk)
            target.write(chunk, offset)
        if checksum.hexdigest() != header.metadata.xxh3_128:
            raise ItemError("checksum of the item does not match", damaged=True)


def check_item_file(path: Path, namespace: str, key: str) -> None:
    """Read all of the file and raise as `read_item_file` unless it is whole."""
    with open(path, "rb", buffering=0) as file:
        header = _read_header(file, namespace, key)
        checksum = xxhash.xxh3_128()
        while chunk := file.read(CHUNK_BYTES):
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
