"""Qwen2-VL."""

from __future__ import annotations

from torch import nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLTextModel

from engine.models.qwen_vl import QwenVLAdapter


class Qwen2VLAdapter(QwenVLAdapter):
    """See the base classes."""

    def make_vision(self) -> nn.Module:
        tower: nn.Module = Qwen2VisionTransformerPretrainedModel(self.config.vision_config)
        return tower

    def make_language(self) -> nn.Module:
        language: nn.Module = Qwen2VLTextModel(self.text_config)
        return language
