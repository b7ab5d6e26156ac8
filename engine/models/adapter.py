"""What the engine needs to know about a model family, and nothing else.

The modelling code is transformers' own. An adapter builds the parts that a role needs (vision tower, language model),
says where their weights are in the checkpoint, and calls them with the arguments they expect. A new family is one file
and one row in `engine/models/registry.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from core.errors import ConfigError
from engine.models.attention import ATTENTION_NAME, StepContext
from engine.models.fused_layers import fuse_layers
from engine.models.weights import real_buffers, tensor_names, weight_files
from kernels.dispatch import Kernels

if TYPE_CHECKING:
    from core.types import PlacedFeature

_PROFILE_SIDE = 448
_PROFILE_IMAGES = 64


class ModelAdapter(ABC):
    """One family. Made once per engine, used on the model runner's thread only.

    `vision` and `language` are None until `build`; a producer never builds `language`, a consumer never `vision`.
    A subclass states `weights` and the abstract methods; the rest fits families whose language model takes embeddings
    and plain positions.

    Raises:
        ConfigError: the configuration asks for something that the engine would compute wrongly.
    """

    #: Beginnings of tensor names in checkpoints: (in the file, "vision" | "language" | "lm_head", in the module). The
    #: first that fits counts. Published checkpoints and newer saves have other names for the same tensors.
    weights: ClassVar[Sequence[tuple[str, str, str]]]

    def __init__(self, model_dir: Path, config: Any, dtype: torch.dtype) -> None:
        self.model_dir = model_dir
        self.config = config
        self.dtype = dtype
        self._refuse_what_is_not_computed()
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
    def num_heads(self) -> int:
        return int(self.text_config.num_attention_heads)

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

    def build(self, *, vision: bool, language: bool) -> None:
        """Make the modules asked for, parameters on the meta device, buffers real.

        Raises:
            ConfigError: transformers cannot make a model of this configuration.
        """
        try:
            with torch.device("meta"):
                if vision:
                    self.config.vision_config._attn_implementation = "sdpa"
                    self.vision = self.make_vision().eval()
                if language:
                    self.text_config._attn_implementation = ATTENTION_NAME
                    self.language = self.make_language().eval()
                    self.lm_head = nn.Linear(self.hidden_size, self.vocab_size, bias=False)
        except (ValueError, TypeError, KeyError, ZeroDivisionError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError("--model", str(self.model_dir), f"config.json describes no model: {reason}") from error
        for module in (self.vision, self.language):
            for part in module.modules() if module is not None else ():
                if hasattr(part, "_init_weights"):
                    real_buffers(part, torch.device("cpu"))

    @abstractmethod
    def make_vision(self) -> nn.Module:
        """The vision tower, with all that stands between pixels and the language model's width."""

    @abstractmethod
    def make_language(self) -> nn.Module:
        """The language model without its head. Has `embed_tokens`."""

    def fuse(self, kernels: Kernels) -> None:
        """Put layers over `kernels` in the place of the loaded language model's. For layers of the form that
        `fused_layers.py` describes; a family with others overrides this to do nothing, and keeps transformers' own.

        Raises:
            ConfigError: the MLP's activation is another than SwiGLU's.
        """
        if self.text_config.hidden_act != "silu":
            self._refuse(f"config.json has the hidden_act {self.text_config.hidden_act!r}; only 'silu' is supported")
        fuse_layers(self.language, kernels, self.rotary_axes(), self.num_deepstack_levels)

    def rotary_axes(self) -> torch.Tensor:
        """The row of the positions that each rotary frequency goes by, `[head_dim / 2]` int64."""
        return torch.zeros(self.head_dim // 2, dtype=torch.int64)

    def rename(self, name: str) -> tuple[str, str] | None:
        """Map a checkpoint tensor to ("vision" | "language" | "lm_head", parameter name)."""
        for prefix, target, inside in self.weights:
            if name.startswith(prefix):
                return target, inside + name.removeprefix(prefix)
        return None

    @cached_property
    def ties_embeddings(self) -> bool:
        """Whether the head is the input embeddings. Where the files hold a head, it is used, as in transformers."""
        if not getattr(self.config, "tie_word_embeddings", False):
            return False
        places = map(self.rename, tensor_names(weight_files(self.model_dir)))
        return not any(place is not None and place[0] == "lm_head" for place in places)

    def _refuse_what_is_not_computed(self) -> None:
        """Attention here is causal over everything, and rotary frequencies are those of the start."""
        text = self.text_config
        if set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
            self._refuse("config.json asks for sliding-window attention, which is not supported")
        rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            self._refuse(f"config.json has the rope_type {rope!r}, which is not supported")

    def _refuse(self, reason: str) -> None:
        raise ConfigError("--model", str(self.model_dir), reason)

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

    def positions(self, num_tokens: int, features: Sequence[PlacedFeature]) -> tuple[NDArray[np.int64], int]:
        """Position ids of a prompt, `[num_position_rows, num_tokens]`, and what is added to the index of every later
        token to give its position."""
        return np.arange(num_tokens, dtype=np.int64)[None, :], 0

    def forward(
        self,
        token_embeds: torch.Tensor,  # [num_tokens, hidden], image rows already in place; may be written to
        positions: torch.Tensor,  # [num_position_rows, num_tokens]
        step: StepContext,
    ) -> torch.Tensor:  # [num_tokens, hidden], after the last norm
        """The language model over flattened tokens."""
        assert self.language is not None
        out = self.language(
            inputs_embeds=token_embeds.unsqueeze(0),
            position_ids=positions if self.num_position_rows == 1 else positions.unsqueeze(1),
            use_cache=False,
            paged=step,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

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
