"""Scenes keep what questions rely on: things apart, large enough, in colours that stand out. A seed is a picture."""

from __future__ import annotations

import hashlib
import itertools
import math
import random

import numpy as np
import pytest

from demo.pictures import COLOURS, MAX_SIDE, MAX_THINGS, MIN_SIDE, SHAPES, Scene, Thing, draw_scene, render

SCENES = [draw_scene(random.Random(seed)) for seed in range(400)]


def test_a_seed_is_a_picture() -> None:
    """For ever: what the model card says of a seed must hold on another machine."""
    digest = hashlib.sha256()
    for seed in range(40):
        image = render(draw_scene(random.Random(seed)))
        digest.update(f"{image.size}".encode() + image.tobytes())
    again = hashlib.sha256()
    for seed in range(40):
        image = render(draw_scene(random.Random(seed)))
        again.update(f"{image.size}".encode() + image.tobytes())
    assert digest.digest() == again.digest()
    assert SCENES[0] == draw_scene(random.Random(0))
    assert SCENES[0] != SCENES[1]


def test_all_that_is_promised_occurs() -> None:
    assert {len(scene.things) for scene in SCENES} == set(range(1, MAX_THINGS + 1))
    assert {thing.colour for scene in SCENES for thing in scene.things} == set(COLOURS)
    assert {thing.shape for scene in SCENES for thing in scene.things} == set(SHAPES)
    sides = [side for scene in SCENES for side in (scene.width, scene.height)]
    assert MIN_SIDE <= min(sides) < 110
    assert 210 < max(sides) <= MAX_SIDE
    square = sum(scene.width == scene.height for scene in SCENES)
    noisy = sum(scene.noise > 0 for scene in SCENES)
    assert 100 < square < 300
    assert 100 < noisy < 300
    assert any(max(scene.background) < 70 for scene in SCENES)
    assert any(min(scene.background) > 190 for scene in SCENES)


def test_things_keep_apart_and_are_large_enough() -> None:
    for scene in SCENES:
        for thing in scene.things:
            assert thing.size >= 26
            assert thing.size >= 0.24 * min(scene.width, scene.height)
            assert 0 <= thing.left <= thing.left + thing.size <= scene.width
            assert 0 <= thing.top <= thing.top + thing.size <= scene.height
        for one, other in itertools.combinations(scene.things, 2):
            apart_x = max(one.left, other.left) - min(one.left + one.size, other.left + other.size)
            apart_y = max(one.top, other.top) - min(one.top + one.size, other.top + other.size)
            assert max(apart_x, apart_y) >= 4
            assert other.x - one.x >= 6, "they are listed from left to right, and clearly so"


def test_backgrounds_are_far_from_every_colour() -> None:
    for scene in SCENES:
        assert min(math.dist(scene.background, colour) for colour in COLOURS.values()) >= 100


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_where_the_scene_says(shape: str) -> None:
    """And has an area of its own: no two shapes cover the same part of their box."""
    thing = Thing("red", shape, 20, 30, 60, (200, 0, 0))
    pixels = np.asarray(render(Scene(128, 112, (255, 255, 255), 0, 1, 0, (thing,))))
    painted = (pixels != 255).any(-1)
    rows, columns = np.nonzero(painted)
    assert 30 <= rows.min() <= 33
    assert 86 <= rows.max() < 90
    assert 20 <= columns.min() <= 23
    assert 76 <= columns.max() < 80
    expected = {"circle": 0.785, "square": 0.846, "triangle": 0.5, "star": 0.32, "cross": 0.54, "ring": 0.62}[shape]
    assert painted[30:90, 20:80].mean() == pytest.approx(expected, abs=0.05)
    assert tuple(pixels[30 + 15, 20 + 30]) == ((200, 0, 0) if shape != "ring" else tuple(pixels[45, 50]))


def test_noise_stays_in_the_background() -> None:
    thing = Thing("blue", "square", 30, 30, 50, (40, 75, 220))
    pixels = np.asarray(render(Scene(112, 112, (128, 128, 128), 30, 2, 7, (thing,)))).astype(int)
    assert (pixels[40:70, 40:70] == (40, 75, 220)).all()
    ground = pixels[:20]
    assert abs(ground - 128).max() <= 30
    assert ground.std() > 10
    assert (ground[0::2, 0::2] == ground[1::2, 1::2]).all(), "a grain of 2 makes specks of 2 x 2"


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    scene = Scene(100, 100, (0, 0, 0), 0, 1, 0, (Thing("red", "cube", 0, 0, 30, (200, 0, 0)),))
    with pytest.raises(ValueError, match="shape 'cube': known are circle, square"):
        render(scene)
