"""Sizes of random checkpoints, the same for all families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model; the names in `text` and `vision` are those of Qwen3-VL's configuration."""

    vocab_size: int
    tokenizer_size: int  # base vocabulary and added tokens; like published ones, smaller than `vocab_size`
    text: Json
    vision: Json
    deepstack_layers: list[int]
    num_position_embeddings: int  # Qwen3-VL's learned grid
    window_size: int  # Qwen2.5-VL's, in pixels
    clip_side: int  # LLaVA's, in pixels
    shortest_edge: int  # in pixels of the whole image, as Qwen's processors mean it
    longest_edge: int
    shard_bytes: int


PRESETS: dict[str, Preset] = {
    # Under 4 MB in float32, and every part there is: grouped queries, three deepstack levels, interleaved M-RoPE.
    "tiny": Preset(
        vocab_size=1024,
        tokenizer_size=1000,
        text={
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
        },
        vision={"depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4},
        deepstack_layers=[0, 1, 2],
        num_position_embeddings=256,
        window_size=56,
        clip_side=84,
        shortest_edge=64 * 64,
        longest_edge=512 * 512,
        shard_bytes=1 << 20,
    ),
    # 270 M parameters; a picture of 448 x 448 makes 196 embeddings.
    "bench": Preset(
        vocab_size=32_000,
        tokenizer_size=31_900,
        text={
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 32_768,
        },
        vision={"depth": 8, "hidden_size": 512, "intermediate_size": 2048, "num_heads": 8},
        deepstack_layers=[1, 3, 5],
        num_position_embeddings=2304,
        window_size=112,
        clip_side=336,
        shortest_edge=256 * 256,
        longest_edge=4096 * 4096,
        shard_bytes=256 << 20,
    ),
}
