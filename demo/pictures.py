"""Pictures of coloured shapes, drawn from a seed: what the demo model is trained on and asked about.

A `Scene` says what a picture shows; `draw_scene` makes one up, `render` paints it. The same random numbers give the
same scene and, pixel for pixel, the same picture. Units are pixels; x runs right, y runs down.
"""

from __future__ import annotations

import functools
import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Rgb = tuple[int, int, int]

COLOURS: dict[str, Rgb] = {
    "red": (215, 35, 40),
    "green": (35, 160, 60),
    "blue": (40, 75, 220),
    "yellow": (242, 215, 40),
    "purple": (140, 45, 175),
    "orange": (245, 130, 25),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")

MIN_SIDE, MAX_SIDE = 96, 224
MAX_THINGS = 4

#: Of the short side: the largest thing, by the number of things.
_LARGEST = (0.55, 0.46, 0.38, 0.34)
_SMALLEST = 0.24
_SMALLEST_PIXELS = 26
_GAP = 4  # between the boxes of two things
_EDGE = 2  # between a box and the edge of the picture
_JITTER = 10  # of each channel of a thing's colour
_FAR = 100.0  # Euclidean distance in RGB of a background from every colour
_OVERSAMPLING = 8
_TRIES = 60


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape in its square box."""

    colour: str  # one of COLOURS
    shape: str  # one of SHAPES
    left: int
    top: int
    size: int  # side of the box
    rgb: Rgb

    @property
    def x(self) -> float:
        """Of the centre."""
        return self.left + self.size / 2

    @property
    def y(self) -> float:
        """Of the centre."""
        return self.top + self.size / 2

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture in words. No two things overlap, and no two centres have nearly the same x."""

    width: int
    height: int
    background: Rgb
    noise: int  # largest deviation of a background pixel's channel; 0 is plain
    grain: int  # side of a speck of noise
    noise_seed: int
    things: tuple[Thing, ...]  # from left to right

    @property
    def description(self) -> str:
        """For people: what is drawn, and how."""
        ground = f"noise of {self.noise} on" if self.noise else "plain"
        return (
            f"{', '.join(thing.name for thing in self.things)}; {ground} {self.background}, {self.width}x{self.height}"
        )


def draw_scene(
    rng: random.Random,
    *,
    num_things: int | None = None,
    kinds: Sequence[tuple[str, str]] | None = None,
    width: int | None = None,
    height: int | None = None,
) -> Scene:
    """A new scene. What is not given is drawn.

    Args:
        num_things: 1 to 4.
        kinds: colour and shape of each thing; their places are drawn.
        width, height: 96 to 224.
    """
    if width is None or height is None:
        width = rng.randint(MIN_SIDE, MAX_SIDE)
        height = width if rng.random() < 0.4 else rng.randint(MIN_SIDE, MAX_SIDE)
    if kinds is None:
        kinds = _draw_kinds(rng, rng.randint(1, MAX_THINGS) if num_things is None else num_things)
    while (boxes := _place(rng, len(kinds), width, height)) is None:
        pass  # a bad beginning; the next one is independent of it, and most succeed
    things = [
        Thing(colour, shape, left, top, size, _jittered(rng, COLOURS[colour]))
        for (colour, shape), (left, top, size) in zip(kinds, boxes, strict=True)
    ]
    things.sort(key=lambda thing: thing.x)
    noise = rng.randint(12, 45) if rng.random() < 0.5 else 0
    return Scene(
        width, height, _draw_background(rng), noise, rng.choice((1, 1, 2, 4)), rng.getrandbits(32), tuple(things)
    )


def render(scene: Scene) -> Image.Image:
    """The picture, RGB."""
    ground = np.empty((scene.height, scene.width, 3), np.int16)
    ground[:] = scene.background
    if scene.noise:
        rows, columns = math.ceil(scene.height / scene.grain), math.ceil(scene.width / scene.grain)
        # Python's generator, not NumPy's: its bytes are the same in every version.
        raw = random.Random(scene.noise_seed).randbytes(rows * columns * 3)
        specks = np.frombuffer(raw, np.uint8).reshape(rows, columns, 3).astype(np.int16) - 128
        specks = specks * scene.noise // 128
        if scene.grain > 1:
            specks = specks.repeat(scene.grain, 0).repeat(scene.grain, 1)
        ground += specks[: scene.height, : scene.width]
        ground.clip(0, 255, out=ground)
    image = Image.fromarray(ground.astype(np.uint8))
    for thing in scene.things:
        image.paste(thing.rgb, (thing.left, thing.top), _mask(thing.shape, thing.size))
    return image


def to_png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _draw_kinds(rng: random.Random, num_things: int) -> list[tuple[str, str]]:
    """Half of the scenes draw from few colours or few shapes, so that there is something to count."""
    colours: Sequence[str] = tuple(COLOURS)
    shapes: Sequence[str] = SHAPES
    if num_things > 1 and (few := rng.random()) < 0.5:
        if few < 0.3:
            colours = rng.sample(colours, rng.randint(1, 2))
        if few > 0.2:
            shapes = rng.sample(shapes, rng.randint(1, 2))
    return [(rng.choice(colours), rng.choice(shapes)) for _ in range(num_things)]


def _place(rng: random.Random, count: int, width: int, height: int) -> list[tuple[int, int, int]] | None:
    """Left, top and size of boxes that keep apart, or None where chance has left no room."""
    short = min(width, height)
    smallest = max(_SMALLEST_PIXELS, math.ceil(_SMALLEST * short))
    largest = max(smallest, int(_LARGEST[count - 1] * short))
    column_gap = max(6.0, 0.06 * width)
    placed: list[tuple[int, int, int]] = []
    for _ in range(_TRIES):
        size = rng.randint(smallest, largest)
        left = rng.randint(_EDGE, width - size - _EDGE)
        top = rng.randint(_EDGE, height - size - _EDGE)
        if all(
            abs((left + size / 2) - (x + other / 2)) >= column_gap
            and (
                left + size + _GAP <= x or x + other + _GAP <= left or top + size + _GAP <= y or y + other + _GAP <= top
            )
            for x, y, other in placed
        ):
            placed.append((left, top, size))
            if len(placed) == count:
                return placed
    return None


def _jittered(rng: random.Random, rgb: Rgb) -> Rgb:
    red, green, blue = (min(255, max(0, channel + rng.randint(-_JITTER, _JITTER))) for channel in rgb)
    return red, green, blue


def _draw_background(rng: random.Random) -> Rgb:
    """Light, dark or between, a little tinted, far from the colour of every thing."""
    while True:
        value = rng.choice((rng.randint(200, 255), rng.randint(0, 50), rng.randint(0, 255)))
        red, green, blue = (min(255, max(0, value + rng.randint(-22, 22))) for _ in range(3))
        if all(math.dist((red, green, blue), colour) >= _FAR for colour in COLOURS.values()):
            return red, green, blue


@functools.lru_cache(maxsize=2048)
def _mask(shape: str, size: int) -> Image.Image:
    """How much of each pixel a shape covers; smooth edges."""
    side = size * _OVERSAMPLING
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    whole = (0, 0, side - 1, side - 1)
    if shape == "circle":
        draw.ellipse(whole, fill=255)
    elif shape == "ring":
        draw.ellipse(whole, fill=255)
        inner = side * 0.27
        draw.ellipse((inner, inner, side - 1 - inner, side - 1 - inner), fill=0)
    elif shape == "square":
        inset = side * 0.04  # so that its area is nearer to the others'
        draw.rectangle((inset, inset, side - 1 - inset, side - 1 - inset), fill=255)
    elif shape == "cross":
        low, high = side * 0.34, side * 0.66
        draw.rectangle((low, 0, high, side - 1), fill=255)
        draw.rectangle((0, low, side - 1, high), fill=255)
    elif shape == "triangle":
        draw.polygon([(0, side - 1), (side - 1, side - 1), (side / 2, 0)], fill=255)
    elif shape == "star":
        draw.polygon(_star(side), fill=255)
    else:
        raise ValueError(f"shape {shape!r}: known are {', '.join(SHAPES)}")
    return mask.reduce(_OVERSAMPLING)


def _star(side: int) -> list[tuple[float, float]]:
    """Five points, the first one up, filling the box."""
    centre, outer, inner = side / 2, side * 0.525, side * 0.21
    corners = []
    for i in range(10):
        radius, angle = (inner if i % 2 else outer), math.pi * (i / 5 - 0.5)
        corners.append((centre + radius * math.cos(angle), side * 0.525 + radius * math.sin(angle)))
    return corners
