"""LLaVA 1.5: a CLIP tower over a square of fixed size, a projector of two layers, and Llama."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from engine.models.adapter import ModelAdapter


class _Tower(nn.Module):
    """`LlavaModel` without its language model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower: Any = CLIPVisionModel(config.vision_config)
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        layers = config.vision_feature_layer
        self._layers = [layers] if isinstance(layers, int) else list(layers)
        # The first embedding is the class token's.
        self._first = 1 if config.vision_feature_select_strategy == "default" else 0

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[num_images, 3, side, side]` -> `[num_images, num_embeds, hidden of the language model]`."""
        states = self.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        chosen = torch.cat([states[layer][:, self._first :] for layer in self._layers], dim=-1)
        embeds: torch.Tensor = self.multi_modal_projector(chosen)
        return embeds


class LlavaAdapter(ModelAdapter):
    """Grids are (1, rows, columns) in patches and the same for every image; each patch makes one embedding, and the
    class token one more under `vision_feature_select_strategy` "full"."""

    weights: ClassVar[Sequence[tuple[str, str, str]]] = (
        ("model.vision_tower.vision_model.", "vision", "vision_tower."),
        ("vision_tower.vision_model.", "vision", "vision_tower."),
        ("model.vision_tower.", "vision", "vision_tower."),
        ("vision_tower.", "vision", "vision_tower."),
        ("model.multi_modal_projector.", "vision", "multi_modal_projector."),
        ("multi_modal_projector.", "vision", "multi_modal_projector."),
        ("lm_head.", "lm_head", ""),
        ("language_model.lm_head.", "lm_head", ""),
        ("model.language_model.", "language", ""),
        ("language_model.model.", "language", ""),
    )

    def __init__(self, model_dir: Path, config: Any, dtype: torch.dtype) -> None:
        super().__init__(model_dir, config, dtype)
        parts = (config.vision_config.model_type, config.text_config.model_type)
        if parts != ("clip_vision_model", "llama"):
            self._refuse(f"llava with {parts[0]} and {parts[1]} is not supported; clip_vision_model and llama are")

    def make_vision(self) -> nn.Module:
        return _Tower(self.config)

    def make_language(self) -> nn.Module:
        language: nn.Module = LlamaModel(self.text_config)
        return language

    def load_image_processor(self) -> None:
        self._processor: Any = CLIPImageProcessorPil.from_pretrained(self.model_dir)

    def preprocess(self, image: Any) -> tuple[torch.Tensor, tuple[int, int, int]]:
        pixels: torch.Tensor = self._processor(images=[image], return_tensors="pt")["pixel_values"]
        patch = self.config.vision_config.patch_size
        return pixels, (1, pixels.shape[-2] // patch, pixels.shape[-1] // patch)

    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        assert self.vision is not None
        return list(self.vision(torch.cat(list(pixels)).to(self.dtype)))
