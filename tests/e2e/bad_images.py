"""Image files made to be refused, each in its own way."""

from __future__ import annotations

import struct
import zlib

from tests.pictures import picture


def png(
    width: int, height: int, *, bit_depth: int = 8, colour: int = 2, pixels: bytes = b"", before: bytes = b""
) -> bytes:
    """A PNG whose header says what it is told. `before` are chunks ahead of the pixels."""
    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour, 0, 0, 0)
    data = zlib.compress(pixels, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side: int = 12_000) -> bytes:
    """A whole and valid picture of `side` times `side` pixels in some 20 kB."""
    return png(side, side, bit_depth=1, colour=0, pixels=bytes((side // 8 + 1) * side))


def jpeg(width: int, height: int) -> bytes:
    """A JPEG whose header says what it is told, with the pixels of another one."""
    data = bytearray(picture(1, 64, 64, format="JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def gif(width: int, height: int) -> bytes:
    """A GIF, frame included, whose header says what it is told."""
    size = struct.pack("<HH", width, height)
    screen = b"GIF89a" + size + b"\x80\x00\x00" + bytes(6)
    frame = b"\x2c" + bytes(4) + size + b"\x00" + b"\x02\x02\x44\x01\x00"
    return screen + frame + b"\x3b"


def many_pieces() -> bytes:
    """A PNG with more chunks before its pixels than any encoder writes."""
    return png(64, 64, before=chunk(b"prIv", b"") * 30_000)


def many_exif_segments() -> bytes:
    """A JPEG whose EXIF comes in several segments: joined, its tags could claim the square of their bytes."""
    whole = picture(1, 64, 64, format="JPEG", orientation=6)
    begin = whole.index(b"\xff\xe1")
    end = begin + 2 + struct.unpack(">H", whole[begin + 2 : begin + 4])[0]
    return whole[:begin] + 2 * whole[begin:end] + whole[end:]


def cut(data: bytes) -> bytes:
    """Without its second half."""
    return data[: len(data) // 2]
