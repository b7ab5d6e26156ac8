"""Configuration files of random Qwen-VL checkpoints, with the keys and the layout of the published ones."""

from __future__ import annotations

from tokenizers import Tokenizer

from demo.checkpoint_sizes import Json, Preset
from demo.checkpoint_text import QWEN2_CHAT_TEMPLATE
from demo.checkpoint_tokenizers import QWEN_ADDED, QWEN_SPECIAL

_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


def qwen3_vl(preset: Preset, tokenizer: Tokenizer, dtype: str) -> dict[str, Json]:
    """Files by name."""
    ids = _ids(tokenizer)
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
                "mrope_section": _sections(preset.text["head_dim"]),
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
            "deepstack_visual_indexes": preset.deepstack_layers,
            "num_position_embeddings": preset.num_position_embeddings,
        },
    }
    return {
        "config.json": config,
        "preprocessor_config.json": {**pixels, "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {**pixels, "video_processor_type": "Qwen3VLVideoProcessor"},
        **_shared(preset, ids, "Qwen3VLProcessor", None),
    }


def qwen2_vl(preset: Preset, tokenizer: Tokenizer, dtype: str) -> dict[str, Json]:
    """Files by name. The head is tied to the embeddings, as in the 2B model."""
    vision = preset.vision
    config = {
        **_flat(preset, _ids(tokenizer), dtype),
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "tie_word_embeddings": True,
        "vision_config": {
            "depth": vision["depth"],
            "embed_dim": vision["hidden_size"],
            "mlp_ratio": vision["intermediate_size"] // vision["hidden_size"],
            "num_heads": vision["num_heads"],
            "in_chans": 3,
            "hidden_size": preset.text["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
    }
    return {"config.json": config, **_qwen2_shared(preset, tokenizer, "Qwen2VLProcessor")}


def qwen2_5_vl(preset: Preset, tokenizer: Tokenizer, dtype: str) -> dict[str, Json]:
    """Files by name. As in the 7B model the head is not tied; one layer in four sees the whole picture."""
    vision = preset.vision
    config = {
        **_flat(preset, _ids(tokenizer), dtype),
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "vision_config": {
            **vision,
            "hidden_act": "silu",
            "in_chans": 3,
            "out_hidden_size": preset.text["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": preset.window_size,
            "fullatt_block_indexes": list(range(3, vision["depth"], 4)),
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }
    return {"config.json": config, **_qwen2_shared(preset, tokenizer, "Qwen2_5_VLProcessor")}


def hub_name(name: str) -> str:
    """What published Qwen2 checkpoints call a parameter of transformers' class."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


def _ids(tokenizer: Tokenizer) -> dict[str, int]:
    vocab = tokenizer.get_vocab()
    return {text: vocab[text] for text in (*QWEN_SPECIAL, *QWEN_ADDED)}


def _sections(head_dim: int) -> list[int]:
    """Pairs of dimensions that turn with time, height and width."""
    side = head_dim // 2 * 5 // 16
    return [head_dim // 2 - 2 * side, side, side]


def _flat(preset: Preset, ids: dict[str, int], dtype: str) -> Json:
    """Text settings, which stand beside `vision_config` here and not in a part of their own."""
    text = {name: value for name, value in preset.text.items() if name != "head_dim"}
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    return {
        **text,
        "vocab_size": preset.vocab_size,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": text["num_hidden_layers"],
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": _sections(head_dim)},
        "rope_theta": 1_000_000.0,
        "sliding_window": text["max_position_embeddings"],
        "use_sliding_window": False,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def _qwen2_shared(preset: Preset, tokenizer: Tokenizer, processor: str) -> dict[str, Json]:
    preprocessor = {
        "min_pixels": preset.shortest_edge,
        "max_pixels": preset.longest_edge,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor,
    }
    return {
        "preprocessor_config.json": preprocessor,
        "chat_template.json": {"chat_template": QWEN2_CHAT_TEMPLATE},
        **_shared(preset, _ids(tokenizer), processor, QWEN2_CHAT_TEMPLATE),
    }


def _shared(preset: Preset, ids: dict[str, int], processor: str, chat_template: str | None) -> dict[str, Json]:
    special_tokens_map = {
        "additional_special_tokens": list(QWEN_SPECIAL[1:]),
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    return {
        "generation_config.json": {
            "bos_token_id": ids["<|endoftext|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "do_sample": True,
            "top_p": 0.8,
            "top_k": 20,
            "temperature": 0.7,
        },
        "special_tokens_map.json": special_tokens_map,
        "added_tokens.json": dict(ids),
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "processor_class": processor,
            "model_max_length": preset.text["max_position_embeddings"],
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "split_special_tokens": False,
            "added_tokens_decoder": {
                str(number): {
                    "content": text,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": text in QWEN_SPECIAL,
                }
                for text, number in ids.items()
            },
            **({} if chat_template is None else {"chat_template": chat_template}),
            **special_tokens_map,
        },
    }
