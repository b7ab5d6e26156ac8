"""What the engine needs to know about a model family, and nothing else.

The modelling code is transformers' own. An adapter builds the parts that a role needs (vision tower, language model),
says where their weights are in the checkpoint, and calls them with the arguments they expect. A new family is one file
and one row in `engine/models/registry.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from core.types import PlacedFeature

#: The name under which our attention stands in transformers' registry (engine/models/attention.py).
ATTENTION_NAME = "triptych_paged"
_PROFILE_SIDE = 448
_PROFILE_IMAGES = 64


class ModelAdapter(ABC):
    """One family. Made once per engine, used on the model runner's thread only.

    `vision` and `language` are None until `build`; a producer never builds `language`, a consumer never `vision`.
    """

    def __init__(self, model_dir: Path, config: Any, dtype: torch.dtype) -> None:
        self.model_dir = model_dir
        self.config = config
        self.dtype = dtype
        self.vision: nn.Module | None = None
        self.language: nn.Module | None = None
        self.lm_head: nn.Module | None = None

    # ---- numbers from the configuration ----

    @property
    def text_config(self) -> Any:
        return self.config.text_config

    @property
    def num_layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    @property
    def num_kv_heads(self) -> int:
        return int(self.text_config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        text = self.text_config
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)

    @property
    def hidden_size(self) -> int:
        return int(self.text_config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @property
    def max_position(self) -> int:
        return int(self.text_config.max_position_embeddings)

    @property
    def num_deepstack_levels(self) -> int:
        """Levels of visual features beyond the input embeddings."""
        return 0

    @property
    def embed_width(self) -> int:
        """Columns of a cached embedding: the input embeddings, then each deepstack level."""
        return self.hidden_size * (1 + self.num_deepstack_levels)

    @property
    def num_position_rows(self) -> int:
        """Rows of the position ids: 3 for M-RoPE, 1 for plain rotary positions."""
        return 1

    # ---- building ----

    @abstractmethod
    def build(self, *, vision: bool, language: bool) -> None:
        """Make the modules asked for, parameters on the meta device, buffers real."""

    @abstractmethod
    def rename(self, name: str) -> tuple[str, str] | None:
        """Map a checkpoint tensor to ("vision" | "language" | "lm_head", parameter name)."""

    @property
    def ties_embeddings(self) -> bool:
        return bool(getattr(self.config, "tie_word_embeddings", False))

    # ---- vision ----

    @abstractmethod
    def load_image_processor(self) -> None:
        """Load the image processor. Producers call it once, at the start."""

    @abstractmethod
    def preprocess(self, image: Any) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """An RGB Pillow image -> pixel values in the tower's own layout, float32, and its grid. Any thread."""

    @abstractmethod
    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """A batch of images through the tower -> one `[num_embeds, embed_width]` each."""

    def profile_vision(self, num_embeds: int, device: torch.device) -> None:
        """Put blank images of some `num_embeds` embeddings through preprocessing and tower."""
        pixels, grid = self.preprocess(Image.new("RGB", (_PROFILE_SIDE, _PROFILE_SIDE)))
        embeds = self.encode([pixels.to(device)], [grid])
        count = min(num_embeds // len(embeds[0]), _PROFILE_IMAGES) if device.type == "cuda" else 1
        if count > 1:
            self.encode([pixels.to(device)] * count, [grid] * count)

    # ---- language ----

    @abstractmethod
    def positions(self, num_tokens: int, features: Sequence[PlacedFeature]) -> tuple[NDArray[np.int64], int]:
        """Position ids of a prompt, `[num_position_rows, num_tokens]`, and what is added to the index of every later
        token to give its position."""

    @abstractmethod
    def forward(
        self,
        token_embeds: torch.Tensor,  # [num_tokens, hidden], image rows already in place
        positions: torch.Tensor,  # [num_position_rows, num_tokens]
        visual_mask: torch.Tensor | None,  # [num_tokens] bool: rows that hold image embeddings
        deepstack: Sequence[torch.Tensor] | None,  # a [num_visual, hidden] for each level
        attention: Any,
    ) -> torch.Tensor:  # [num_tokens, hidden], after the last norm
        """The language model over flattened tokens."""

    def embed_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[num_tokens]` int64 -> `[num_tokens, hidden]`."""
        assert self.language is not None
        out: torch.Tensor = self.language.embed_tokens(token_ids)  # type: ignore[operator]
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, hidden]` -> `[num_rows, vocab]`."""
        assert self.lm_head is not None
        out: torch.Tensor = self.lm_head(hidden)
        return out
