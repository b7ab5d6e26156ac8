"""What tells the families and sizes of random checkpoints apart: tokenizer, configuration files, chat template.

A family is one entry of `FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from demo.checkpoint_text import CORPUS, QWEN_CHAT_TEMPLATE

Json = dict[str, Any]

#: Qwen's pre-tokenizer, as its published tokenizer.json has it.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Qwen's added tokens in the order of their ids; those of the second tuple are not special.
_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model; the names are those of the configuration files."""

    vocab_size: int
    tokenizer_size: int  # base vocabulary and added tokens; like published ones, smaller than `vocab_size`
    text: Json
    vision: Json
    mrope_section: tuple[int, int, int]
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
        vision={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "deepstack_visual_indexes": [0, 1, 2],
            "num_position_embeddings": 256,
        },
        mrope_section=(6, 5, 5),
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
        vision={
            "depth": 8,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_heads": 8,
            "deepstack_visual_indexes": [1, 3, 5],
            "num_position_embeddings": 2304,
        },
        mrope_section=(12, 10, 10),
        shortest_edge=256 * 256,
        longest_edge=4096 * 4096,
        shard_bytes=256 << 20,
    ),
}


def train_qwen_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE of exactly `size` tokens, Qwen's added tokens last. The same for the same size, always."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    base_size = size - len(_QWEN_SPECIAL) - len(_QWEN_ADDED)
    trainer = trainers.BpeTrainer(
        vocab_size=base_size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    if tokenizer.get_vocab_size() < base_size:
        tokenizer.model = _widened(tokenizer, base_size)
    for texts, special in ((_QWEN_SPECIAL, True), (_QWEN_ADDED, False)):
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} tokens, not {size}")
    return tokenizer


def _widened(tokenizer: Tokenizer, size: int) -> models.BPE:
    """The trained model with merges of two trained tokens appended, for vocabularies larger than the corpus can fill.

    The new merges rank last, so what the corpus taught comes first.
    """
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    merges = [(left, right) for left, right in model["merges"]]
    words = [text for text in vocab if len(text) > 1 and text.removeprefix("Ġ").isascii() and text[1:].isalpha()]
    for left in words:
        for right in words:
            if len(vocab) == size:
                return models.BPE(vocab=vocab, merges=merges)
            if right.isalpha() and right.isascii() and left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    raise ValueError(f"the corpus gives no more than {len(vocab)} tokens, {size} are wanted")


def _qwen3_vl(preset: Preset, tokenizer: Tokenizer, dtype: str) -> dict[str, Json]:
    """Configuration files of Qwen3-VL by name, with the keys of the published ones."""
    ids = {text: tokenizer.token_to_id(text) for text in (*_QWEN_SPECIAL, *_QWEN_ADDED)}
    pixels = {
        "size": {"shortest_edge": preset.shortest_edge, "longest_edge": preset.longest_edge},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": preset.vocab_size,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-06,
            "rope_theta": 5_000_000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": list(preset.mrope_section),
                "rope_type": "default",
            },
            "use_cache": True,
            "dtype": dtype,
            **preset.text,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "initializer_range": 0.02,
            "out_hidden_size": preset.text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **preset.vision,
        },
    }
    special_tokens_map = {
        "additional_special_tokens": list(_QWEN_SPECIAL[1:]),
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    return {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": ids["<|endoftext|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "do_sample": True,
            "top_p": 0.8,
            "top_k": 20,
            "temperature": 0.7,
        },
        "preprocessor_config.json": {**pixels, "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {**pixels, "video_processor_type": "Qwen3VLVideoProcessor"},
        "special_tokens_map.json": special_tokens_map,
        "added_tokens.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "processor_class": "Qwen3VLProcessor",
            "model_max_length": preset.text["max_position_embeddings"],
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "split_special_tokens": False,
            "added_tokens_decoder": {
                str(ids[text]): {
                    "content": text,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": text in _QWEN_SPECIAL,
                }
                for text in ids
            },
            **special_tokens_map,
        },
    }


#: Family -> (its tokenizer of a size, its configuration files, its chat template).
FAMILIES: dict[str, tuple[Callable[[int], Tokenizer], Callable[[Preset, Tokenizer, str], dict[str, Json]], str]] = {
    "qwen3_vl": (train_qwen_tokenizer, _qwen3_vl, QWEN_CHAT_TEMPLATE),
}
