"""Image files as clients send them: what the header says, and the pixels.

`read_header` runs in the router and in the encoder's front, `decode_rgb` in the encoder's engine. Both apply the EXIF
orientation by the same rule, so the grid that is predicted from the header is the grid of the pixels. Both may be
called from any thread.

What a hostile file can cost is bounded three ways. Pixels and bytes: by limits that are checked before any pixel is
decoded. The header: Pillow's parsers walk through it in Python, piece by piece, so the number and size of the pieces
that they may read is counted. Time: no thread can be stopped from outside, but Pillow decodes as it reads, so once the
time is over the next read fails. In between it is inside a C decoder with at most `_DECODE_BLOCK` bytes of the file;
WebP and compressed TIFF get all of it in one call, which their number of pixels bounds.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import ExifTags, Image, ImageFile, TiffImagePlugin

from core.errors import InvalidRequestError
from core.struct import Struct

#: What is read. Other formats that Pillow knows are rare, and each parser is a way in.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES = 32 << 20
MAX_PIXELS = 64_000_000
#: Ordinary pictures at the limit of pixels take one to two seconds on a slow core.
MAX_DECODE_S = 15.0
#: Part of the preprocessing that an item's key covers; raise it when `decode_rgb` makes other pixels of a file.
DECODE_VERSION = 1

# Of damaged metadata. A picture is refused or it is not; what clients send must not fill the log.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)

# Pillow's own guard warns at one limit and raises at twice that, process-wide. Every image here passes `_check_size`
# before a pixel is decoded.
Image.MAX_IMAGE_PIXELS = None

#: A picture from a camera has some tens of pieces before its pixels, a scan with a large colour profile some hundreds.
_MAX_HEADER_READS = 20_000
#: A header may be read twice (a TIFF's directory), and no more than that is there; the rest is room for small files.
_HEADER_READ_FACTOR = 2
_HEADER_READ_ROOM = 1 << 16
#: More than one segment of a JPEG holds. Before Pillow 13 the parser's work can grow with the square of it.
_MAX_EXIF_BYTES = 1 << 16
_EXIF_MARK = b"Exif\0\0"
_DECODE_BLOCK = 1 << 13

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
#: Orientations that swap width and height.
_SWAPPING = (5, 6, 7, 8)


class _TooCostlyError(Exception):
    """Holds what was too much. Not an OSError, which some of Pillow's parsers take for a harmless one."""


class _File(BytesIO):
    """An image file that counts what is read of its header, and whose reads fail after a moment in time."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads_left: int | None = _MAX_HEADER_READS
        self._bytes_left = _HEADER_READ_FACTOR * len(data) + _HEADER_READ_ROOM
        self._num_exif = 0
        self._max_s = 0.0
        self._deadline_s = float("inf")

    def begin_pixels(self, max_s: float) -> None:
        """The header has been read; what follows has `max_s` seconds."""
        self._reads_left = None
        self._max_s = max_s
        self._deadline_s = time.monotonic() + max_s

    def check_time(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise _TooCostlyError(f"decoding takes longer than {self._max_s:g} s, the limit")

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if self._reads_left is None:
            self.check_time()
            return data
        self._reads_left -= 1
        self._bytes_left -= len(data)
        # Pillow joins the EXIF segments of a JPEG and parses them before we see them.
        self._num_exif += data.startswith(_EXIF_MARK)
        if self._reads_left < 0:
            raise _TooCostlyError(f"the header has more than {_MAX_HEADER_READS} pieces, the limit")
        if self._bytes_left < 0:
            raise _TooCostlyError("parts of the header overlap")
        if self._num_exif > 1:
            raise _TooCostlyError("the header has more than 1 EXIF segment, the limit")
        return data


class ImageHeader(Struct, frozen=True):
    """Size as displayed, in pixels, the EXIF orientation applied; `format` is one of `FORMATS`."""

    width: int
    height: int
    format: str


def read_header(
    data: bytes, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS, part: str = "image"
) -> ImageHeader:
    """Size and format of an image file. Decodes no pixels: some 0.1 ms.

    `part` names the image in errors ("image 2 of 3").

    Raises:
        InvalidRequestError: the data is empty, too long, not an image of a format in `FORMATS`, has too many pixels or
            a header that is too costly to read.
    """
    with _opened(data, max_bytes, part) as (image, _):
        header = _header(image)
        _check_size(header, max_pixels, part)
    return header


def decode_rgb(
    data: bytes,
    *,
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
    max_s: float = MAX_DECODE_S,
    part: str = "image",
) -> Image.Image:
    """Pixels of an image file: mode RGB, the size that `read_header` gives, the first frame of several.

    Transparent pixels are laid over white, as transformers does since 5.23. Samples of 16 bits are scaled to 8, where
    Pillow's own conversion would cut them off at 255.

    Raises:
        InvalidRequestError: as `read_header`, and where the file is cut short, its pixels cannot be decoded, or are not
            after `max_s` seconds.
    """
    with _opened(data, max_bytes, part) as (image, file):
        header = _header(image)
        _check_size(header, max_pixels, part)
        file.begin_pixels(max_s)
        transpose = None if header.format == "TIFF" else _TRANSPOSE.get(_orientation(image))
        rgb = _to_rgb(image)
        file.check_time()
        if transpose is not None:
            rgb = rgb.transpose(transpose)
        if (rgb.width, rgb.height) != (header.width, header.height):
            raise InvalidRequestError(
                f"{part}: the header says {header.width} x {header.height} pixels, the data {rgb.width} x {rgb.height}"
            )
        # A copy without the file's metadata, so that nobody applies the orientation a second time.
        rgb.info = {}
        rgb.getexif().clear()
        return rgb


@contextmanager
def _opened(data: bytes, max_bytes: int, part: str) -> Iterator[tuple[Image.Image, _File]]:
    if not data:
        raise InvalidRequestError(f"{part}: no bytes")
    if len(data) > max_bytes:
        raise InvalidRequestError(f"{part}: {len(data)} bytes; the limit is {max_bytes}")
    known = ", ".join(FORMATS)
    file = _File(data)
    try:
        image = Image.open(file, formats=FORMATS)
    except MemoryError:
        raise
    except _TooCostlyError as error:
        raise InvalidRequestError(f"{part}: {error}") from None
    except Exception:  # Pillow's parsers let out whatever a broken file makes them raise
        raise InvalidRequestError(f"{part}: not an image that can be read; supported are {known}") from None
    try:
        with image:
            yield image, file
    except (InvalidRequestError, MemoryError):
        raise
    except _TooCostlyError as error:
        raise InvalidRequestError(f"{part}: {error}") from None
    except Exception:  # Pillow's parsers let out whatever a broken file makes them raise
        raise InvalidRequestError(f"{part}: the {image.format} file is damaged or cut short") from None


def _header(image: Image.Image) -> ImageHeader:
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        # Pillow turns a TIFF by itself while loading; whether `size` knows of it before that depends on the version.
        width, height = image.tag_v2[TiffImagePlugin.IMAGEWIDTH], image.tag_v2[TiffImagePlugin.IMAGELENGTH]
        swapped = image.tag_v2.get(ExifTags.Base.Orientation) in _SWAPPING
    else:
        swapped = _orientation(image) in _SWAPPING
    if swapped:
        width, height = height, width
    # An MPO is a JPEG with more pictures behind the first.
    return ImageHeader(int(width), int(height), "JPEG" if image.format == "MPO" else str(image.format))


def _check_size(header: ImageHeader, max_pixels: int, part: str) -> None:
    if header.width < 1 or header.height < 1:
        raise InvalidRequestError(f"{part}: {header.width} x {header.height} pixels; each side must be at least 1")
    if header.width * header.height > max_pixels:
        raise InvalidRequestError(f"{part}: {header.width} x {header.height} pixels; the limit is {max_pixels} in all")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8, from what stands before the pixels; 1 where there is none or it cannot be read."""
    # The second one is in hexadecimal digits.
    if (
        len(image.info.get("exif", b"")) > _MAX_EXIF_BYTES
        or len(image.info.get("Raw profile type exif", "")) > 2 * _MAX_EXIF_BYTES
    ):
        return 1
    try:
        # The base class's method: PNG's own decodes the whole file, in search of metadata behind the pixels.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # damaged metadata is no reason to refuse a picture
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if isinstance(image, ImageFile.ImageFile):
        image.decodermaxblock = _DECODE_BLOCK
    image.load()
    if image.mode.startswith("I;16") or image.mode == "I":
        # 16-bit greyscale, which some formats deliver in 32-bit integers.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()
