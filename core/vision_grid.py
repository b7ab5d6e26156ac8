"""How many embeddings an image will make, from its size alone: no pixels, no torch.

Router, encoder and prefill must agree on the grid before the image is encoded, so the resize rule of the family's image
processor is written here a second time. A test holds it against the processor itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from core.errors import ConfigError, InvalidRequestError
from core.images import DECODE_VERSION

#: Family -> image processor class of transformers that its encoder runs.
_PROCESSORS = {"qwen3_vl": "Qwen2VLImageProcessorPil"}

#: Longer side over shorter side; Qwen's processors refuse more.
MAX_ASPECT_RATIO = 200


class VisionGrid(msgspec.Struct, frozen=True):
    """The resize rule of one checkpoint. Sides in pixels, `min_pixels` and `max_pixels` of the whole image."""

    family: str
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    config: dict[str, Any]  # preprocessor_config.json as it stands

    @classmethod
    def from_model(cls, model_dir: str | Path) -> VisionGrid:
        """Read config.json and preprocessor_config.json of a checkpoint.

        Raises:
            ConfigError: a file is absent or unreadable, the family is unknown, or the settings are none of its own.
        """
        family = _read(model_dir, "config.json").get("model_type")
        if family not in _PROCESSORS:
            known = ", ".join(_PROCESSORS)
            raise ConfigError("--model", str(model_dir), f"model_type {family!r} is not supported; supported: {known}")
        config = _read(model_dir, "preprocessor_config.json")
        size = config.get("size") or {}
        # Older files say min_pixels and max_pixels, and where both are given these win, as in the processor.
        values = {
            "patch_size": config.get("patch_size", 14),
            "merge_size": config.get("merge_size", 2),
            "min_pixels": config.get("min_pixels") or size.get("shortest_edge", 56 * 56),
            "max_pixels": config.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
        }
        for name, value in values.items():
            if type(value) is not int or value < 1:
                raise ConfigError("--model", str(model_dir), f"preprocessor_config.json has {name} {value!r}")
        if values["min_pixels"] > values["max_pixels"]:
            raise ConfigError("--model", str(model_dir), "preprocessor_config.json has min_pixels above max_pixels")
        if config.get("do_resize", True) is not True:
            raise ConfigError("--model", str(model_dir), "preprocessor_config.json turns do_resize off")
        return cls(family=family, config=config, **values)

    def predict(self, width: int, height: int) -> tuple[tuple[int, int, int], int]:
        """Grid (time, height, width) in patches, and the number of embeddings, for an image of that size.

        The rule is `smart_resize` of Qwen2-VL (transformers, models/qwen2_vl/image_processing_qwen2_vl.py): sides
        become multiples of patch times merge, the area comes between the two limits, the aspect ratio stays as near as
        it can.

        Raises:
            InvalidRequestError: a side is below 1, or one side is more than 200 times the other.
        """
        if width < 1 or height < 1:
            raise InvalidRequestError(f"image: {width} x {height} pixels; each side must be at least 1")
        if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
            raise InvalidRequestError(
                f"image: {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other"
            )
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

    def preprocessing_id(self) -> str:
        """Canonical JSON of all that turns an image file into the vision tower's input, for `keys.namespace_digest`."""
        parts = {"class": _PROCESSORS[self.family], "config": self.config, "decode": DECODE_VERSION}
        return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


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
