"""The predicted grid is the one that transformers' own image processor makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from core.errors import ConfigError, InvalidRequestError
from core.vision_grid import PatchGrid, SquareGrid, VisionGrid

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


def _grid(patch_size: int, min_pixels: int, max_pixels: int) -> PatchGrid:
    return PatchGrid("qwen3_vl", "", {}, patch_size, 2, min_pixels, max_pixels)


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
    grid = _grid(14, *limits)
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


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_the_qwen_families_share_one_rule(tmp_path: Path, family: str) -> None:
    assert isinstance(VisionGrid.from_model(_model(tmp_path, family)), PatchGrid)


CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
    "do_center_crop": True,
}


def _llava(folder: Path, config: dict[str, object] | None = None, **changes: object) -> Path:
    vision = {"image_size": 56, "patch_size": 14}
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": vision, **(config or {})}))
    settings = {name: value for name, value in {**CLIP, **changes}.items() if value is not None}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_clip_makes_one_square_of_everything(tmp_path_factory: pytest.TempPathFactory, width: int, height: int) -> None:
    folder = _llava(tmp_path_factory.getbasetemp())
    grid = VisionGrid.from_model(folder)
    if max(width, height) / min(width, height) > 200:
        with pytest.raises(InvalidRequestError, match="200"):
            grid.predict(width, height)
        return
    made = CLIPImageProcessorPil.from_pretrained(folder)(Image.new("RGB", (width, height)), return_tensors="np")
    assert made["pixel_values"].shape == (1, 3, 56, 56)
    assert grid.predict(width, height) == ((1, 4, 4), 16)


def test_clip_settings_in_their_other_spellings(tmp_path: Path) -> None:
    for config, changes, count in (
        ({"vision_feature_select_strategy": "full"}, {}, 17),
        ({}, {"crop_size": 56, "size": 56}, 16),
        ({}, {"do_center_crop": False, "size": {"height": 56, "width": 56}}, 16),
        ({}, {"image_processor_type": None}, 16),
    ):
        grid = VisionGrid.from_model(_llava(tmp_path, config, **changes))
        assert isinstance(grid, SquareGrid)
        assert grid.predict(3, 5) == ((1, 4, 4), count)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({}, {"image_processor_type": "SiglipImageProcessor"}, "SiglipImageProcessor"),
        ({}, {"crop_size": {"height": 56, "width": 70}}, r"makes images of \(56, 70\)"),
        ({}, {"do_center_crop": False}, "makes images of .*shortest_edge"),
        ({}, {"do_center_crop": False, "do_resize": False}, "makes images of any size"),
        ({"vision_config": {"image_size": 84, "patch_size": 14}}, {}, "asks for 84 x 84"),
        ({"vision_config": {"image_size": 56, "patch_size": 0}}, {}, "patch_size 0"),
    ],
)
def test_clip_settings_that_do_not_fit_are_named(
    tmp_path: Path, config: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        VisionGrid.from_model(_llava(tmp_path, config, **changes))


def test_settings_within_processor_config_win_as_in_transformers(tmp_path: Path) -> None:
    folder = _model(tmp_path)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {**CONFIG, "patch_size": 8}}))
    made = Qwen2VLImageProcessorPil.from_pretrained(folder)(Image.new("RGB", (90, 60)), return_tensors="np")
    assert VisionGrid.from_model(folder).predict(90, 60)[0] == tuple(made["image_grid_thw"][0].tolist())


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
        ({"model_type": "gpt2"}, "supported: qwen3_vl, qwen2_5_vl, qwen2_vl, llava"),
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
    grid = _grid(16, 1, 10**6)
    with pytest.raises(InvalidRequestError, match="at least 1"):
        grid.predict(*size)
