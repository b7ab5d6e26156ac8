"""Qwen3-VL: deepstack features enter the first layers of the language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel

from engine.models.qwen_vl import QwenVLAdapter
from kernels.mrope_axes import interleaved_axes


class Qwen3VLAdapter(QwenVLAdapter):
    """See the base classes. The tower is called itself, not `get_image_features`, whose deepstack features come in one
    shape up to transformers 5.17 and in another later."""

    @property
    def num_deepstack_levels(self) -> int:
        return len(self.config.vision_config.deepstack_visual_indexes)

    def make_vision(self) -> nn.Module:
        tower: nn.Module = Qwen3VLVisionModel(self.config.vision_config)
        return tower

    def make_language(self) -> nn.Module:
        language: nn.Module = Qwen3VLTextModel(self.text_config)
        return language

    def embeddings(self, made: Any) -> torch.Tensor:
        # Levels side by side, so that one item is one tensor: [embeds | level 0 | level 1 | …].
        return torch.cat([made.pooler_output, *made.deepstack_features], dim=-1)

    def rotary_axes(self) -> torch.Tensor:
        return interleaved_axes(self.mrope_section([24, 20, 20]), self.head_dim // 2)
