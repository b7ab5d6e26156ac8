"""Images are prepared in the background, and what nobody wants any more is forgotten, whenever that is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.types import Feature
from core.vision_grid import VisionGrid
from engine.image_preparer import ImagePreparer
from engine.models.adapter import ModelAdapter
from engine.models.registry import open_model
from tests.pictures import picture

A, B = "a" * 64, "b" * 64
DEADLINE_S = 20.0


class Bench:
    """A preparer with one thread, which a test can hold up."""

    def __init__(self, adapter: ModelAdapter, model: Path) -> None:
        self._grid = VisionGrid.from_model(model)
        self._told = threading.Event()
        self.preparer = ImagePreparer(adapter, torch.device("cpu"), 1, self._told.set)
        self.ready: list[str] = []
        self.failed: dict[str, str] = {}

    def submit(self, key: str, image: bytes, size: tuple[int, int]) -> Feature:
        grid, num_embeds = self._grid.predict(*size)
        feature = Feature(key, num_embeds, grid, 8)
        self.preparer.submit(feature, image)
        return feature

    def wait_for(self, key: str) -> None:
        while key not in self.ready and key not in self.failed:
            assert self._told.wait(DEADLINE_S)
            self._told.clear()
            self.poll()

    def poll(self) -> None:
        ready, failed = self.preparer.poll()
        self.ready += ready
        self.failed |= failed

    def hold_up(self) -> threading.Event:
        """Occupy the thread until the event is set."""
        go_on, begun = threading.Event(), threading.Event()

        def wait() -> None:
            begun.set()
            go_on.wait(DEADLINE_S)

        self.preparer._pool.submit(wait)
        assert begun.wait(DEADLINE_S)
        return go_on


@pytest.fixture
def bench(tiny_model: Path) -> Iterator[Bench]:
    adapter = open_model(tiny_model, "float32")
    adapter.load_image_processor()
    bench = Bench(adapter, tiny_model)
    yield bench
    bench.preparer.close()


def test_pixels_are_ready_once_and_taken_once(bench: Bench) -> None:
    feature = bench.submit(A, picture(1, 64, 96), (64, 96))
    bench.wait_for(A)
    pixels = bench.preparer.take(A)
    assert pixels.shape[0] == feature.grid[1] * feature.grid[2]
    bench.poll()
    assert bench.ready == [A]
    with pytest.raises(KeyError):
        bench.preparer.take(A)


@pytest.mark.parametrize(
    ("image", "size", "words"),
    [
        (b"no image at all", (64, 64), "image"),
        (picture(1, 64, 64)[:200], (64, 64), "image"),
        (picture(1, 64, 96), (96, 64), "its header predicts the grid"),
    ],
)
def test_what_is_wrong_with_an_image_is_said(bench: Bench, image: bytes, size: tuple[int, int], words: str) -> None:
    bench.submit(A, image, size)
    bench.submit(B, picture(2, 64, 64), (64, 64))
    bench.wait_for(A)
    bench.wait_for(B)
    assert words in bench.failed[A]
    assert bench.ready == [B]


def test_an_image_forgotten_in_the_queue_is_never_prepared(bench: Bench) -> None:
    go_on = bench.hold_up()
    bench.submit(A, picture(1, 64, 64), (64, 64))
    bench.submit(B, picture(2, 64, 64), (64, 64))
    bench.preparer.forget(A)
    go_on.set()
    bench.wait_for(B)
    assert (bench.ready, bench.failed) == ([B], {})
    assert bench.preparer._pending == {}


def test_an_image_forgotten_when_ready_leaves_no_pixels(bench: Bench) -> None:
    bench.submit(A, picture(1, 64, 64), (64, 64))
    bench.wait_for(A)
    bench.preparer.forget(A)
    bench.preparer.forget(A)
    assert bench.preparer._pixels == {}


def test_an_image_wanted_again_is_reported_by_its_second_preparation_alone(bench: Bench) -> None:
    go_on = bench.hold_up()
    bench.submit(A, b"broken", (64, 64))
    bench.preparer.forget(A)
    bench.submit(A, picture(1, 64, 64), (64, 64))
    go_on.set()
    bench.wait_for(A)
    assert (bench.ready, bench.failed) == ([A], {})
