"""A picture as coarse colour blocks, for terminals that have colours."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TextIO

from PIL import Image

#: The upper half of a character cell; the lower half shows the background colour. So a cell is two square pixels.
_UPPER_HALF = "▀"
_RESET = "\x1b[0m"


def can_show(out: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `out` is a terminal that shows colours and block characters, and its user wants them
    (https://no-color.org)."""
    if not out.isatty() or environ.get("TERM", "dumb") == "dumb" or environ.get("NO_COLOR"):
        return False
    return (out.encoding or "").lower().startswith("utf")


def draw(pictures: list[bytes], *, rows: int = 12, true_colour: bool = True) -> str:
    """Image files side by side, `rows` lines high, each as wide as its shape wants. Raises Pillow's errors."""
    blocks = [_lines(picture, rows, true_colour) for picture in pictures]
    return "\n".join("  ".join(parts) for parts in zip(*blocks, strict=True))


def _lines(picture: bytes, rows: int, true_colour: bool) -> list[str]:
    with Image.open(io.BytesIO(picture)) as image:
        pixels = image.convert("RGB")
    columns = max(1, round(2 * rows * pixels.width / pixels.height))
    data = pixels.resize((columns, 2 * rows), Image.Resampling.BOX).tobytes()

    def colour(x: int, y: int) -> tuple[int, int, int]:
        start = 3 * (y * columns + x)
        return data[start], data[start + 1], data[start + 2]

    code = _true_colour if true_colour else _one_of_256
    return [
        "".join(
            f"\x1b[38;{code(colour(x, 2 * row))};48;{code(colour(x, 2 * row + 1))}m{_UPPER_HALF}"
            for x in range(columns)
        )
        + _RESET
        for row in range(rows)
    ]


def _true_colour(rgb: tuple[int, int, int]) -> str:
    return "2;{};{};{}".format(*rgb)


def _one_of_256(rgb: tuple[int, int, int]) -> str:
    """The nearest of the 6 x 6 x 6 colours that every terminal with 256 colours has."""
    red, green, blue = (round(value / 255 * 5) for value in rgb)
    return f"5;{16 + 36 * red + 6 * green + blue}"
