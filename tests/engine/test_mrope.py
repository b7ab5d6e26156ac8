"""Our M-RoPE positions are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from core.types import Feature, PlacedFeature
from engine.models.mrope import mrope_positions

MERGE = 2
IMAGE_ID = 9


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Qwen3VLModel:
    config = AutoConfig.from_pretrained(tiny_model)
    assert config.vision_config.spatial_merge_size == MERGE
    with torch.device("meta"):
        return Qwen3VLModel(config)


@pytest.mark.parametrize("seed", range(30))
def test_positions_equal_transformers(model: Qwen3VLModel, seed: int) -> None:
    draw = random.Random(seed)
    tokens: list[int] = []
    placed: list[PlacedFeature] = []
    for i in range(draw.randint(0, 4)):
        # Between two images there is text, always: the markers of their begin and end.
        tokens += [1] * draw.randint(0 if i == 0 else 1, 12)
        grid = (1, MERGE * draw.randint(1, 9), MERGE * draw.randint(1, 9))
        count = grid[1] * grid[2] // MERGE**2
        placed.append(PlacedFeature(Feature("k", count, grid, 8), len(tokens)))
        tokens += [IMAGE_ID] * count
    tokens += [1] * draw.randint(0 if placed else 1, 12)

    ids = torch.tensor([tokens])
    grids = torch.tensor([p.feature.grid for p in placed]) if placed else None
    theirs, theirs_delta = model.get_rope_index(ids, (ids == IMAGE_ID).int(), image_grid_thw=grids)
    ours, delta = mrope_positions(len(tokens), placed, MERGE)
    assert ours.dtype == np.int64
    assert np.array_equal(ours, theirs[:, 0].numpy())
    assert delta == int(theirs_delta)


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 2, 2), (2, 4, 4)])
def test_a_grid_that_contradicts_its_number_of_embeddings_is_no_layout(grid: tuple[int, int, int]) -> None:
    """EngineCore refuses such a request because of this error."""
    with pytest.raises(ValueError, match="reshape"):
        mrope_positions(10, [PlacedFeature(Feature("k", 4, grid, 8), 1)], MERGE)
