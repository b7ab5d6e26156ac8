"""How many embeddings an image will make, from its size alone: no pixels, no torch.

Router, encoder and prefill must agree on the grid before the image is encoded, so the resize rule of the family's image
processor is written here a second time. A test holds it against the processor itself.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.errors import ConfigError, InvalidRequestError
from core.images import DECODE_VERSION
from core.struct import Struct

Grid = tuple[int, int, int]

#: Longer side over shorter side. Qwen's processors refuse more; CLIP's would make huge pictures on their way.
MAX_ASPECT_RATIO = 200


class VisionGrid(Struct, frozen=True):
    """The resize rule of one checkpoint. Sides in pixels."""

    family: str
    processor: str  # image processor class of transformers that the encoder runs
    settings: dict[str, Any]  # all that preprocessing depends on, as it stands in the checkpoint's files

    @staticmethod
    def from_model(model_dir: str | Path) -> VisionGrid:
        """Read config.json and preprocessor_config.json of a checkpoint.

        Raises:
            ConfigError: a file is absent or unreadable, the family is unknown, or the settings are none of its own.
        """
        config = _read(model_dir, "config.json")
        family = config.get("model_type")
        if family not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ConfigError("--model", str(model_dir), f"model_type {family!r} is not supported; supported: {known}")
        settings = _read_processor(model_dir)
        try:
            return _FAMILIES[family](family, config, settings)
        except ValueError as error:
            raise ConfigError("--model", str(model_dir), f"preprocessor_config.json {error}") from None

    def predict(self, width: int, height: int) -> tuple[Grid, int]:
        """Grid (time, height, width) in patches, and the number of embeddings, for an image of that size.

        Raises:
            InvalidRequestError: a side is below 1, or one side is more than 200 times the other.
        """
        if width < 1 or height < 1:
            raise InvalidRequestError(f"image: {width} x {height} pixels; each side must be at least 1")
        if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
            raise InvalidRequestError(
                f"image: {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other"
            )
        return self._predict(width, height)

    def preprocessing_id(self) -> str:
        """Canonical JSON of all that turns an image file into the vision tower's input, for `keys.namespace_digest`."""
        parts = {"class": self.processor, "config": self.settings, "decode": DECODE_VERSION}
        return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @abstractmethod
    def _predict(self, width: int, height: int) -> tuple[Grid, int]: ...


class PatchGrid(VisionGrid, frozen=True):
    """Qwen-VL: sides become multiples of patch times merge, and the area comes between two limits (in pixels)."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def read(cls, family: str, config: dict[str, Any], settings: dict[str, Any]) -> PatchGrid:
        """Raises ValueError that names the setting."""
        size = settings.get("size") or {}
        # Older files say min_pixels and max_pixels, and where both are given these win, as in the processor.
        values = {
            "patch_size": settings.get("patch_size", 14),
            "merge_size": settings.get("merge_size", 2),
            "min_pixels": settings.get("min_pixels") or size.get("shortest_edge", 56 * 56),
            "max_pixels": settings.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
        }
        for name, value in values.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"has {name} {value!r}")
        if values["min_pixels"] > values["max_pixels"]:
            raise ValueError("has min_pixels above max_pixels")
        if settings.get("do_resize", True) is not True:
            raise ValueError("turns do_resize off")
        return cls(family=family, processor="Qwen2VLImageProcessorPil", settings=settings, **values)

    def _predict(self, width: int, height: int) -> tuple[Grid, int]:
        """`smart_resize` of Qwen2-VL (transformers, models/qwen2_vl/image_processing_qwen2_vl.py): the aspect ratio
        stays as near as it can."""
        unit = self.patch_size * self.merge_size
        # Python's round, to the even one at a half: that is what the processor calls.
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if rows * columns > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(unit, math.floor(height / shrink / unit) * unit)
            columns = max(unit, math.floor(width / shrink / unit) * unit)
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / unit) * unit
            columns = math.ceil(width * grow / unit) * unit
        if rows < unit or columns < unit:
            raise InvalidRequestError(
                f"image: {width} x {height} pixels; one side would shrink to nothing in patches of {unit}"
            )
        grid = (1, rows // self.patch_size, columns // self.patch_size)
        return grid, grid[1] * grid[2] // self.merge_size**2


class SquareGrid(VisionGrid, frozen=True):
    """CLIP: every image is cut to one square, and makes a fixed number of embeddings."""

    side: int  # in patches
    num_embeds: int

    @classmethod
    def read(cls, family: str, config: dict[str, Any], settings: dict[str, Any]) -> SquareGrid:
        """Raises ValueError that names the setting."""
        processor = settings.get("image_processor_type", "CLIPImageProcessor")
        if processor not in ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"):
            raise ValueError(f"has image_processor_type {processor!r}; supported is CLIPImageProcessor")
        vision = config.get("vision_config") or {}
        image, patch = vision.get("image_size", 224), vision.get("patch_size", 32)
        if not (type(image) is type(patch) is int and 0 < patch <= image):
            raise ValueError(f"does not fit config.json, whose image_size is {image!r} and patch_size {patch!r}")
        made = _size_of_output(settings)
        if made != (image, image):
            raise ValueError(f"makes images of {made}, but config.json asks for {image} x {image}")
        side = image // patch
        class_token = config.get("vision_feature_select_strategy", "default") == "full"
        return cls(
            family=family,
            processor="CLIPImageProcessorPil",
            settings=settings,
            side=side,
            num_embeds=side * side + class_token,
        )

    def _predict(self, width: int, height: int) -> tuple[Grid, int]:
        return (1, self.side, self.side), self.num_embeds


def _size_of_output(settings: dict[str, Any]) -> object:
    """(height, width) that CLIP's processor makes of every image, or what it says where that is not one size."""
    if settings.get("do_center_crop", True):
        size = settings.get("crop_size", 224)
    elif settings.get("do_resize", True):
        size = settings.get("size")
    else:
        return "any size"
    if type(size) is int:
        return (size, size) if settings.get("do_center_crop", True) else f"shortest edge {size}"
    if isinstance(size, dict) and "height" in size and "width" in size:
        return size["height"], size["width"]
    return size


#: Families, and how their rule is read from (family, config.json, preprocessor_config.json).
_FAMILIES: dict[str, Callable[[str, dict[str, Any], dict[str, Any]], VisionGrid]] = {
    "qwen3_vl": PatchGrid.read,
    "qwen2_5_vl": PatchGrid.read,
    "qwen2_vl": PatchGrid.read,
    "llava": SquareGrid.read,
}


def _read_processor(model_dir: str | Path) -> dict[str, Any]:
    """The image processor's settings: as transformers does, from processor_config.json where they are part of it."""
    if (Path(model_dir) / "processor_config.json").is_file():
        nested = _read(model_dir, "processor_config.json").get("image_processor")
        if isinstance(nested, dict):
            return nested
    return _read(model_dir, "preprocessor_config.json")


def _read(model_dir: str | Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((Path(model_dir) / name).read_bytes())
    except FileNotFoundError:
        raise ConfigError("--model", str(model_dir), f"has no {name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError("--model", str(model_dir), f"{name} cannot be read: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise ConfigError("--model", str(model_dir), f"{name} holds no JSON object")
    return content
