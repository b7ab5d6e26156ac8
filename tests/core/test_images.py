"""Headers and pixels of image files agree, with every orientation, and bad files end in named errors."""

from __future__ import annotations

import random
import struct
import time
import warnings
import zlib
from io import BytesIO

import pytest
from PIL import ExifTags, Image, ImageOps

from core.errors import InvalidRequestError
from core.images import FORMATS, decode_rgb, read_header


def _picture(mode: str = "RGB", size: tuple[int, int] = (40, 24)) -> Image.Image:
    pixels = random.Random(1).randbytes(3 * 5 * 3)
    return Image.frombytes("RGB", (5, 3), pixels).resize(size, Image.Resampling.BICUBIC).convert(mode)


def _file(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def _oriented(format: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return _file(_picture(), format, exif=exif)


def _png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data does not have."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format: str) -> None:
    data = _file(_picture(), format)
    header = read_header(data)
    assert (header.width, header.height, header.format) == (40, 24, format)
    rgb = decode_rgb(data)
    assert (rgb.mode, rgb.size) == ("RGB", (40, 24))
    assert rgb.tobytes() == Image.open(BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_is_applied_to_header_and_pixels(format: str, orientation: int) -> None:
    data = _oriented(format, orientation)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    header = read_header(data)
    assert (header.width, header.height) == expected.size == ((24, 40) if orientation > 4 else (40, 24))
    rgb = decode_rgb(data)
    assert rgb.size == expected.size
    assert rgb.tobytes() == expected.tobytes()
    # A second application would turn it again.
    assert ImageOps.exif_transpose(rgb).tobytes() == rgb.tobytes()


def test_a_header_needs_no_pixels() -> None:
    header = read_header(_png(5000, 3000))
    assert (header.width, header.height) == (5000, 3000)
    whole = _oriented("PNG", 6)
    assert read_header(whole[: whole.index(b"IDAT") + 4]).width == 24


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "LA", "RGBA", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    if mode == "I;16":
        # A ramp over all 16 bits: cut off at 255 instead of scaled, it would be white but for its first pixel.
        image = Image.frombytes("I;16", (40, 24), struct.pack("<960H", *(value * 68 for value in range(960))))
        rgb = decode_rgb(_file(image, "PNG"))
        assert rgb.getpixel((0, 12)) == (480 * 68 // 256,) * 3
        return
    image = _picture(mode) if mode != "LA" else _picture("L").convert("LA")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rgb = decode_rgb(_file(image, "TIFF" if mode == "CMYK" else "PNG"))
    assert (rgb.mode, rgb.size) == ("RGB", (40, 24))
    assert rgb.tobytes() == image.convert("RGB").tobytes()


def test_transparency_is_laid_over_white_as_transformers_does() -> None:
    from transformers.image_transforms import convert_to_rgb

    layer = _picture("RGBA")
    layer.putalpha(Image.linear_gradient("L").resize(layer.size))
    palette = _picture("RGB").convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    for data in (
        _file(layer, "PNG"),
        _file(palette, "PNG", transparency=bytes(range(0, 160, 10))),
        _file(layer, "WEBP"),
    ):
        expected = convert_to_rgb(Image.open(BytesIO(data)), return_numpy=True)
        assert decode_rgb(data).tobytes() == expected.tobytes()


def test_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = _file(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_rgb(data).getpixel((0, 0)) == (255, 0, 0)


def test_several_pictures_in_one_jpeg() -> None:
    frames = [_picture(), _picture(size=(8, 8))]
    data = _file(frames[0], "MPO", save_all=True, append_images=frames[1:])
    header = read_header(data)
    assert (header.width, header.height, header.format) == (40, 24, "JPEG")
    assert decode_rgb(data).size == (40, 24)


@pytest.mark.parametrize(
    "data",
    [
        b"GIF89a",
        b"hello",
        b"\x89PNG\r\n\x1a\n",
        b"%PDF-1.4",
        b"\xff\xd8\xff",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
)
def test_no_image(data: bytes) -> None:
    for read in (read_header, decode_rgb):
        with pytest.raises(InvalidRequestError, match="image 2 of 3: not an image that can be read; supported are PNG"):
            read(data, part="image 2 of 3")


def test_other_formats_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not an image"):
        read_header(_file(_picture(), "PPM"))


def test_limits_are_named() -> None:
    data = _file(_picture(), "PNG")
    with pytest.raises(InvalidRequestError, match=f"image: {len(data)} bytes; the limit is 100"):
        read_header(data, max_bytes=100)
    with pytest.raises(InvalidRequestError, match="40 x 24 pixels; the limit is 900 in all"):
        read_header(data, max_pixels=900)
    with pytest.raises(InvalidRequestError, match="no bytes"):
        read_header(b"")


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_a_bomb_is_refused_without_a_warning(side: int) -> None:
    # Pillow itself would pass the first, warn of the second and raise at the third.
    for read in (read_header, decode_rgb):
        with pytest.raises(InvalidRequestError, match=f"{side} x {side} pixels; the limit is 64000000"):
            read(_png(side, side))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
def test_a_file_that_is_cut_short(format: str) -> None:
    data = _file(_picture(size=(200, 160)), format)
    with pytest.raises(InvalidRequestError, match="image"):
        decode_rgb(data[: len(data) // 2])


def test_random_damage_ends_in_pixels_or_in_a_named_error() -> None:
    numbers = random.Random(5)
    files = [_file(_picture(), format) for format in FORMATS] + [
        _oriented(f, 6) for f in ("JPEG", "PNG", "WEBP", "TIFF")
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's about damaged metadata
        for _ in range(600):
            data = bytearray(numbers.choice(files))
            for _ in range(numbers.randint(1, 6)):
                data[numbers.randrange(len(data))] = numbers.randrange(256)
            try:
                header = read_header(bytes(data), max_pixels=10**6)
                rgb = decode_rgb(bytes(data), max_pixels=10**6)
            except InvalidRequestError:
                continue
            assert rgb.size == (header.width, header.height)


def progressive_scans(num_scans: int, side: int) -> bytes:
    """A progressive JPEG that repeats a scan: each is few bytes of the file and a pass over all blocks."""
    data = _file(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    begin = data.rindex(b"\xff\xda")
    return data[:begin] + data[begin:-2] * num_scans + data[-2:]


def test_decoding_ends_when_its_time_is_over() -> None:
    data = progressive_scans(2000, 2000)
    started_s = time.thread_time()
    with pytest.raises(InvalidRequestError, match=r"image 1: decoding takes longer than 0\.2 s, the limit"):
        decode_rgb(data, max_s=0.2, part="image 1")
    # What is between two looks at the clock is a few scans, not all of them.
    assert time.thread_time() - started_s < 5


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xff\xd8" + b"\xff" * 100_000, "the header has more than 20000 pieces"),
        (b"\xff\xd8" + b"\xff\xfe\x00\x02" * 30_000, "the header has more than 20000 pieces"),
        (b"\xff\xd8" + b"\xff\xe1\x00\x0cExif\0\0abcd" * 3, "the header has more than 1 EXIF segment"),
    ],
    ids=["padding", "comments", "exif"],
)
def test_a_header_that_is_costly_to_read(data: bytes, expected: str) -> None:
    for read in (read_header, decode_rgb):
        with pytest.raises(InvalidRequestError, match=expected):
            read(data)


def test_a_directory_whose_tags_claim_the_same_bytes() -> None:
    """Each of them a copy of nearly the whole file: their sum would be its square."""
    num_tags, size = 4000, 200_000
    tags = b"".join(struct.pack("<HHII", 40_000 + i, 7, size // 2, 100) for i in range(num_tags))
    data = b"II*\0" + struct.pack("<IH", 8, num_tags) + tags + bytes(4)
    # Pillow 13 passes over such tags by itself, earlier ones do as they are told.
    with pytest.raises(InvalidRequestError, match=r"parts of the header overlap|not an image"):
        read_header(data + bytes(size))


def test_metadata_too_large_for_an_orientation_is_passed_over() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.ImageDescription] = "x" * 70_000
    header = read_header(_file(_picture(), "PNG", exif=exif))
    assert (header.width, header.height) == (40, 24)
