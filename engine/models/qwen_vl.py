"""What the Qwen-VL families share: images of any size in patches, M-RoPE positions, names of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.models.adapter import ModelAdapter
from engine.models.mrope import mrope_positions
from kernels.mrope_axes import blocked_axes

if TYPE_CHECKING:
    from core.types import PlacedFeature


class QwenVLAdapter(ModelAdapter):
    """Grids are (time, height, width) in patches; `spatial_merge_size` squared of them make one embedding."""

    weights: ClassVar[Sequence[tuple[str, str, str]]] = (
        ("model.visual.", "vision", ""),
        ("visual.", "vision", ""),
        ("lm_head.", "lm_head", ""),
        ("model.language_model.", "language", ""),
        ("model.", "language", ""),
    )

    @property
    def num_position_rows(self) -> int:
        return 3

    def rotary_axes(self) -> torch.Tensor:
        return blocked_axes(self.mrope_section([16, 24, 24]))

    def mrope_section(self, default: list[int]) -> list[int]:
        """How many frequencies go by time, height and width. `default` is what transformers takes where the
        configuration says nothing."""
        section: list[int] = (self.text_config.rope_parameters or {}).get("mrope_section", default)
        return section

    def load_image_processor(self) -> None:
        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(self.model_dir)

    def preprocess(self, image: Any) -> tuple[torch.Tensor, tuple[int, int, int]]:
        made = self._processor(images=[image], return_tensors="pt")
        frames, rows, columns = made["image_grid_thw"][0].tolist()
        return made["pixel_values"], (frames, rows, columns)

    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        assert self.vision is not None
        grid = torch.tensor(grids, dtype=torch.int64, device=pixels[0].device)
        made = self.vision(torch.cat(list(pixels)).to(self.dtype), grid_thw=grid, return_dict=True)
        merge = self.config.vision_config.spatial_merge_size**2
        return list(self.embeddings(made).split([t * h * w // merge for t, h, w in grids]))

    def embeddings(self, made: Any) -> torch.Tensor:
        """`[num_embeds of all images, embed_width]` out of what the tower returned."""
        embeds: torch.Tensor = made.pooler_output
        return embeds

    def positions(self, num_tokens: int, features: Sequence[PlacedFeature]) -> tuple[NDArray[np.int64], int]:
        return mrope_positions(num_tokens, features, self.config.vision_config.spatial_merge_size)
