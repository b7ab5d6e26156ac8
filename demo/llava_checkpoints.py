"""Configuration files of random LLaVA checkpoints, with the keys and the layout of LLaVA 1.5's."""

from __future__ import annotations

from tokenizers import Tokenizer

from demo.checkpoint_sizes import Json, Preset
from demo.checkpoint_tokenizers import LLAMA_SPECIAL, LLAVA_ADDED

_PATCH = 14


def llava(preset: Preset, tokenizer: Tokenizer, dtype: str) -> dict[str, Json]:
    """Files by name."""
    vocab = tokenizer.get_vocab()
    ids = {text: vocab[text] for text in (*LLAMA_SPECIAL, *LLAVA_ADDED)}
    side = preset.clip_side
    square = {"height": side, "width": side}
    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "ignore_index": -100,
        "image_token_index": ids["<image>"],
        "image_seq_length": (side // _PATCH) ** 2,
        "pad_token_id": ids["<pad>"],
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": preset.vocab_size,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-05,
            "torch_dtype": dtype,
            **preset.text,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "num_hidden_layers": preset.vision["depth"],
            "hidden_size": preset.vision["hidden_size"],
            "intermediate_size": preset.vision["intermediate_size"],
            "num_attention_heads": preset.vision["num_heads"],
            "projection_dim": preset.vision["hidden_size"],
            "image_size": side,
            "patch_size": _PATCH,
            "vocab_size": 32_000,
        },
    }
    return {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": ids["<s>"],
            "eos_token_id": ids["</s>"],
            "pad_token_id": ids["<pad>"],
        },
        "preprocessor_config.json": {
            "crop_size": square,
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "CLIPImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "processor_class": "LlavaProcessor",
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": side},
        },
        "processor_config.json": {
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": _PATCH,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
        "special_tokens_map.json": special_tokens_map,
        "added_tokens.json": {text: ids[text] for text in LLAVA_ADDED},
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "processor_class": "LlavaProcessor",
            "model_max_length": preset.text["max_position_embeddings"],
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "legacy": False,
            "padding_side": "left",
            "added_tokens_decoder": {
                str(number): {
                    "content": text,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for text, number in ids.items()
            },
            **special_tokens_map,
        },
    }


def hub_name(name: str) -> str:
    """What published LLaVA checkpoints call a parameter of transformers' class."""
    for ours, theirs in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name
