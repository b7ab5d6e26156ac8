"""Small pictures for tests: coarse coloured noise, so that every one gives other embeddings."""

from __future__ import annotations

import io
import random

from PIL import Image

_EXIF_ORIENTATION = 0x0112


def picture(seed: int, width: int, height: int, *, format: str = "PNG", orientation: int | None = None) -> bytes:
    """An encoded image file. With `orientation` (EXIF, 1 to 8) the pixels are stored turned and the file says so."""
    draw = random.Random(seed)
    side = 8
    small = Image.new("RGB", (-(-width // side), -(-height // side)))
    small.putdata(
        [(draw.randrange(256), draw.randrange(256), draw.randrange(256)) for _ in range(small.width * small.height)]
    )
    image = small.resize((width, height), Image.Resampling.NEAREST)
    out = io.BytesIO()
    if orientation is None:
        image.save(out, format)
    else:
        exif = Image.Exif()
        exif[_EXIF_ORIENTATION] = orientation
        image.save(out, format, exif=exif)
    return out.getvalue()
