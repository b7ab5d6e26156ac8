"""The predicted grid is the one that transformers' own image processor makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from core.errors import ConfigError, InvalidRequestError
from core.vision_grid import VisionGrid

CONFIG = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 64 * 64, "longest_edge": 160 * 160},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def _model(folder: Path, model_type: str = "qwen3_vl", **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[VisionGrid, Qwen2VLImageProcessorPil]:
    folder = _model(tmp_path_factory.mktemp("model"))
    return VisionGrid.from_model(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400))
def test_equals_the_processor(pair: tuple[VisionGrid, Qwen2VLImageProcessorPil], width: int, height: int) -> None:
    grid, processor = pair
    if max(width, height) / min(width, height) > 200:
        with pytest.raises(InvalidRequestError, match="200"):
            grid.predict(width, height)
        return
    made = processor(Image.new("RGB", (width, height)), return_tensors="np")
    expected = tuple(made["image_grid_thw"][0].tolist())
    assert grid.predict(width, height) == (expected, expected[0] * expected[1] * expected[2] // 4)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 2000), st.integers(1, 8000))
def test_equals_the_processors_rule_for_any_limits(width: int, height: int, low: int, more: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    limits = (low * 100, low * 100 + more * 100)
    grid = VisionGrid("qwen3_vl", patch_size=14, merge_size=2, min_pixels=limits[0], max_pixels=limits[1], config={})
    try:
        predicted = grid.predict(width, height)
    except InvalidRequestError:
        # Too long, or a side that the rule rounds to zero: the processor has no use for such an image either.
        assert max(width, height) / min(width, height) > 200 or 0 in smart_resize(height, width, 28, *limits)
        return
    rows, columns = smart_resize(height, width, 28, *limits)
    assert predicted == ((1, rows // 14, columns // 14), rows * columns // 28**2)


def test_older_spelling_of_the_limits(tmp_path: Path) -> None:
    folder = _model(tmp_path, min_pixels=128 * 128, max_pixels=192 * 192)
    grid = VisionGrid.from_model(folder)
    made = Qwen2VLImageProcessorPil.from_pretrained(folder)(Image.new("RGB", (30, 20)), return_tensors="np")
    assert grid.predict(30, 20)[0] == tuple(made["image_grid_thw"][0].tolist())


def test_preprocessing_id_is_canonical_and_sees_every_setting(tmp_path: Path) -> None:
    first = VisionGrid.from_model(_model(tmp_path)).preprocessing_id()
    assert json.loads(first)["class"] == "Qwen2VLImageProcessorPil"
    shuffled = dict(reversed(list(CONFIG.items())))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(shuffled, indent=4))
    assert VisionGrid.from_model(tmp_path).preprocessing_id() == first
    assert VisionGrid.from_model(_model(tmp_path, image_mean=[0.4, 0.5, 0.5])).preprocessing_id() != first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 0}, "patch_size 0"),
        ({"merge_size": "2"}, "merge_size '2'"),
        ({"size": {"shortest_edge": 100, "longest_edge": 50}}, "min_pixels above max_pixels"),
        ({"do_resize": False}, "do_resize"),
        ({"model_type": "gpt2"}, "supported: qwen3_vl"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VisionGrid.from_model(_model(tmp_path, **change))  # type: ignore[arg-type]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        VisionGrid.from_model(tmp_path)
    _model(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be read"):
        VisionGrid.from_model(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        VisionGrid.from_model(tmp_path)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_zero_sides_are_refused(size: tuple[int, int]) -> None:
    grid = VisionGrid("qwen3_vl", patch_size=16, merge_size=2, min_pixels=1, max_pixels=10**6, config={})
    with pytest.raises(InvalidRequestError, match="at least 1"):
        grid.predict(*size)
