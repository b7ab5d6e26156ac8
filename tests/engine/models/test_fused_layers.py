"""Layers over the kernels compute what transformers' own layers compute over the same weights and the same cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import ConfigError
from engine.models.adapter import ModelAdapter
from engine.models.attention import ImageRows, StepContext
from engine.models.registry import open_model
from engine.models.weights import load_weights, weight_files
from kernels.dispatch import Kernels, LayerShapes, choose_kernels
from tests.engine.models.conftest import Families

CPU = torch.device("cpu")
BLOCK_SIZE = 16
#: (cached, new): a decode, a whole prompt, and a later chunk of one.
SEQUENCES = ((20, 1), (0, 37), (16, 19))


def loaded(model_dir: Path, *, fused: bool, unusual: bool = False) -> tuple[ModelAdapter, Kernels]:
    adapter = open_model(model_dir, "float32")
    adapter.build(vision=False, language=True)
    assert adapter.language is not None
    load_weights(
        weight_files(model_dir), {"language": adapter.language}, adapter.rename, dtype=torch.float32, device=CPU
    )
    if unusual:
        # Numbers that these checkpoints have at 1 or near zero, so that what ignores them shows.
        language: Any = adapter.language
        language.rotary_emb.attention_scaling = 1.3
        for module in language.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 0.3
    shapes = LayerShapes(adapter.hidden_size, adapter.num_heads, adapter.num_kv_heads, adapter.head_dim)
    kernels = choose_kernels(CPU, torch.float32, shapes, {})
    if fused:
        adapter.fuse(kernels)
    return adapter, kernels


def hidden_of(model_dir: Path, *, fused: bool, images: bool = False, unusual: bool = False) -> torch.Tensor:
    adapter, kernels = loaded(model_dir, fused=fused, unusual=unusual)
    query_lens, seq_lens = (np.array(each) for each in zip(*((n, c + n) for c, n in SEQUENCES), strict=True))
    table = np.random.default_rng(0).permutation(9).reshape(3, 3)
    generator = torch.Generator().manual_seed(0)
    shape = (9, adapter.num_layers, 2, BLOCK_SIZE, adapter.num_kv_heads, adapter.head_dim)
    cache = torch.randn(shape, generator=generator)
    num_tokens = int(query_lens.sum())
    embeds = torch.randn(num_tokens, adapter.hidden_size, generator=generator)
    positions = torch.randint(0, 90, (adapter.num_position_rows, num_tokens), generator=generator)
    buffer = torch.randn(8, adapter.embed_width, generator=generator)
    rows = ImageRows(buffer, torch.tensor([3, 5, 40]), torch.tensor([7, 0, 2])) if images else None
    if rows is not None and not fused:
        for i in range(adapter.num_deepstack_levels):
            _add_level(adapter, i, rows)
    batch = kernels.plan(query_lens, seq_lens, table, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        return adapter.forward(embeds, positions, StepContext(kernels, cache, batch, rows))


def _add_level(adapter: ModelAdapter, i: int, images: ImageRows) -> None:
    """What deepstack is, by hooks on transformers' layers: behind layer i, level i is added to the images' tokens."""
    width = adapter.hidden_size

    def add(_module: Any, _arguments: Any, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[0, images.tokens] += images.buffer[images.rows, (i + 1) * width : (i + 2) * width]
        return hidden

    adapter.language.layers[i].register_forward_hook(add)  # type: ignore[union-attr, index]


@pytest.mark.parametrize("unusual", [False, True])
def test_equal_to_transformers_layers(families: Families, family: str, unusual: bool) -> None:
    model_dir = families.model_dir(family)
    made, expected = (hidden_of(model_dir, fused=fused, unusual=unusual) for fused in (True, False))
    assert made.shape == expected.shape
    assert float((made - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_deepstack_levels_are_added(families: Families) -> None:
    model_dir = families.model_dir("qwen3_vl")
    made, expected = (hidden_of(model_dir, fused=fused, images=True) for fused in (True, False))
    assert float((made - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert not torch.equal(made, hidden_of(model_dir, fused=True))


def test_another_activation_is_refused(families: Families) -> None:
    adapter, kernels = loaded(families.model_dir("llava"), fused=False)
    adapter.text_config.hidden_act = "gelu"
    with pytest.raises(ConfigError, match="'gelu'"):
        adapter.fuse(kernels)
