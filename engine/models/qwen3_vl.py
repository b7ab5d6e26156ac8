"""Qwen3-VL: M-RoPE, and deepstack features that enter the first layers of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from core.types import PlacedFeature
from engine.models.adapter import ATTENTION_NAME, ModelAdapter
from engine.models.mrope import mrope_positions
from engine.models.weights import real_buffers


class Qwen3VLAdapter(ModelAdapter):
    """See the base class. Grids are (time, height, width) in patches."""

    @property
    def num_deepstack_levels(self) -> int:
        return len(self.config.vision_config.deepstack_visual_indexes)

    @property
    def num_position_rows(self) -> int:
        return 3

    def build(self, *, vision: bool, language: bool) -> None:
        with torch.device("meta"):
            self._build(vision, language)
        for module in (self.vision, self.language):
            if module is not None:
                real_buffers(module, torch.device("cpu"))

    def _build(self, vision: bool, language: bool) -> None:
        if vision:
            self.config.vision_config._attn_implementation = "sdpa"
            self.vision = Qwen3VLVisionModel(self.config.vision_config).eval()
        if language:
            self.text_config._attn_implementation = ATTENTION_NAME
            self.language = Qwen3VLTextModel(self.text_config).eval()
            self.lm_head = nn.Linear(self.hidden_size, self.vocab_size, bias=False)

    def rename(self, name: str) -> tuple[str, str] | None:
        for prefix, target in (("model.visual.", "vision"), ("model.language_model.", "language")):
            if name.startswith(prefix):
                return target, name.removeprefix(prefix)
        if name == "lm_head.weight":
            return "lm_head", "weight"
        return None

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
        # Levels side by side, so that one item is one tensor: [embeds | level 0 | level 1 | …].
        embeds = torch.cat([made.pooler_output, *made.deepstack_features], dim=-1)
        merge = self.config.vision_config.spatial_merge_size**2
        return list(embeds.split([t * h * w // merge for t, h, w in grids]))

    def positions(self, num_tokens: int, features: Sequence[PlacedFeature]) -> tuple[NDArray[np.int64], int]:
        return mrope_positions(num_tokens, features, self.config.vision_config.spatial_merge_size)

    def forward(
        self,
        token_embeds: torch.Tensor,
        positions: torch.Tensor,
        visual_mask: torch.Tensor | None,
        deepstack: Sequence[torch.Tensor] | None,
        attention: Any,
    ) -> torch.Tensor:
        assert self.language is not None
        out = self.language(
            inputs_embeds=token_embeds.unsqueeze(0),
            position_ids=positions.unsqueeze(1),
            visual_pos_masks=None if visual_mask is None else visual_mask.unsqueeze(0),
            deepstack_visual_embeds=None if deepstack is None else list(deepstack),
            use_cache=False,
            paged=attention,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden
