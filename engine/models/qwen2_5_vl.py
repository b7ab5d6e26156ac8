"""Qwen2.5-VL: a vision tower whose layers attend within windows, but for a few."""

from __future__ import annotations

from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLTextModel,
)

from engine.models.qwen_vl import QwenVLAdapter


class Qwen25VLAdapter(QwenVLAdapter):
    """See the base classes. The tower puts its embeddings back into the order of the picture by itself."""

    def make_vision(self) -> nn.Module:
        tower: nn.Module = Qwen2_5_VisionTransformerPretrainedModel(self.config.vision_config)
        return tower

    def make_language(self) -> nn.Module:
        language: nn.Module = Qwen2_5_VLTextModel(self.text_config)
        return language
