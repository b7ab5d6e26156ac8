"""Grid, number of embeddings and positions that are predicted are those of processor, tower and transformers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from core.types import Feature, PlacedFeature
from core.vision_grid import MAX_ASPECT_RATIO, VisionGrid
from engine.models.adapter import ModelAdapter
from engine.models.registry import open_model
from engine.models.weights import load_weights, weight_files
from tests.engine.models.conftest import Families

CPU = torch.device("cpu")
SIDES = st.integers(1, 400)


@pytest.fixture(scope="module")
def encoder(families: Families, family: str) -> tuple[VisionGrid, ModelAdapter]:
    model_dir = families.model_dir(family)
    adapter = open_model(model_dir, "float32")
    adapter.build(vision=True, language=False)
    assert adapter.vision is not None
    load_weights(weight_files(model_dir), {"vision": adapter.vision}, adapter.rename, dtype=torch.float32, device=CPU)
    adapter.load_image_processor()
    return VisionGrid.from_model(model_dir), adapter


@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES)
def test_the_processor_makes_the_predicted_grid(
    encoder: tuple[VisionGrid, ModelAdapter], width: int, height: int
) -> None:
    grid, adapter = encoder
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        return  # refused: tests/core/test_vision_grid.py
    _, made = adapter.preprocess(Image.new("RGB", (width, height)))
    assert grid.predict(width, height)[0] == made


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(SIDES, st.integers(1, 8)), min_size=1, max_size=3))
def test_the_tower_makes_the_predicted_embeddings(
    encoder: tuple[VisionGrid, ModelAdapter], sizes: list[tuple[int, int]]
) -> None:
    """Batches of images of other sizes; the second number is the ratio of the sides."""
    grid, adapter = encoder
    images = [(side, max(1, side // ratio)) for side, ratio in sizes]
    prepared = [adapter.preprocess(Image.new("RGB", size)) for size in images]
    with torch.inference_mode():
        embeds = adapter.encode([pixels for pixels, _ in prepared], [made for _, made in prepared])
    expected = [(grid.predict(*size)[1], adapter.embed_width) for size in images]
    assert [tuple(item.shape) for item in embeds] == expected


def test_positions_are_those_of_transformers(families: Families, family: str) -> None:
    model: Any = families.reference(family).model
    model_dir = families.model_dir(family)
    adapter = open_model(model_dir, "float32")
    grid = VisionGrid.from_model(model_dir)
    draw = random.Random(3)
    for num_images in (0, 1, 1, 2, 3, 5):
        features, ids = [], [1] * draw.randrange(1, 9)
        for _ in range(num_images):
            made, num_embeds = grid.predict(draw.randrange(20, 300), draw.randrange(20, 300))
            features.append(PlacedFeature(Feature("0" * 64, num_embeds, made, adapter.embed_width), len(ids)))
            ids += [model.config.image_token_id] * num_embeds + [1] * draw.choice([1, 2, 7])
        ids.append(1)
        positions, delta = adapter.positions(len(ids), features)
        if adapter.num_position_rows == 1 or not features:
            rows = adapter.num_position_rows
            np.testing.assert_array_equal(positions, np.broadcast_to(np.arange(len(ids)), (rows, len(ids))))
            assert delta == 0
            continue
        tokens = torch.tensor([ids])
        expected, deltas = model.model.get_rope_index(
            tokens,
            mm_token_type_ids=(tokens == model.config.image_token_id).int(),
            image_grid_thw=torch.tensor([placed.feature.grid for placed in features]),
        )
        np.testing.assert_array_equal(positions, expected[:, 0].numpy())
        assert delta == int(deltas[0])
