"""The demo model's sizes, and its checkpoint as a folder in Hugging Face's layout."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from demo import qwen_checkpoints
from demo.checkpoint_sizes import Json, Preset
from demo.pictures import MAX_SIDE, MIN_SIDE
from demo.training.tokenizer import CHAT_TEMPLATE, train_tokenizer

#: Of the learned position embeddings. As small as usual, they drown beside the patches, and `where` is not learnt.
_POSITION_DEVIATION = 0.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model. Two patches a side make one embedding."""

    patch_size: int = 12
    text_hidden: int = 192
    text_layers: int = 4
    text_heads: int = 6
    text_mlp: int = 512
    vision_hidden: int = 128
    vision_layers: int = 4
    vision_mlp: int = 384
    head_dim: int = 32

    @property
    def cell(self) -> int:
        """Pixels a side of what one embedding sees."""
        return 2 * self.patch_size


#: Of the model that is shipped.
SIZES = Sizes()


def write_files(folder: Path, sizes: Sizes) -> Tokenizer:
    """All files but the weights. Files that are there are replaced."""
    tokenizer = train_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _configs(sizes, tokenizer).items():
        _replace(folder / name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    _replace(folder / "chat_template.jinja", CHAT_TEMPLATE.encode())
    _replace(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    return tokenizer


def new_model(folder: Path, seed: int) -> Any:
    """An untrained model in float32 for the folder's config.json. The same for the same seed."""
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    nn.init.normal_(model.model.visual.pos_embed.weight, std=_POSITION_DEVIATION)
    return model


def write_weights(folder: Path, model: Any) -> None:
    """`model.safetensors` in bfloat16; tied weights once."""
    tied = {"lm_head.weight"}
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    aside = folder / ".model.safetensors.partial"
    save_file(weights, aside, metadata={"format": "pt"})
    aside.chmod(0o644)  # safetensors writes for the owner alone
    aside.replace(folder / "model.safetensors")


def _configs(sizes: Sizes, tokenizer: Tokenizer) -> dict[str, Json]:
    """Files by name: those of a random checkpoint of the family, with this model's sizes."""
    vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
    side = MAX_SIDE // sizes.cell * 2
    preset = Preset(
        vocab_size=vocab_size,
        tokenizer_size=tokenizer.get_vocab_size(),
        text={
            "hidden_size": sizes.text_hidden,
            "intermediate_size": sizes.text_mlp,
            "num_hidden_layers": sizes.text_layers,
            "num_attention_heads": sizes.text_heads,
            "num_key_value_heads": 2,
            "head_dim": sizes.head_dim,
            "max_position_embeddings": 4096,
        },
        vision={
            "depth": sizes.vision_layers,
            "hidden_size": sizes.vision_hidden,
            "intermediate_size": sizes.vision_mlp,
            "num_heads": sizes.vision_hidden // sizes.head_dim,
        },
        deepstack_layers=[1, 2, 3],
        num_position_embeddings=side * side,
        window_size=56,
        clip_side=84,
        shortest_edge=(MIN_SIDE - sizes.cell) ** 2,
        longest_edge=(MAX_SIDE + sizes.cell) ** 2,
        shard_bytes=1 << 30,
    )
    files = qwen_checkpoints.qwen3_vl(preset, tokenizer, "bfloat16")
    config = files["config.json"]
    config["tie_word_embeddings"] = True
    config["text_config"]["tie_word_embeddings"] = True
    config["text_config"]["rope_theta"] = 10_000
    config["dtype"] = "bfloat16"
    config["vision_config"]["patch_size"] = sizes.patch_size
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        files[name]["patch_size"] = sizes.patch_size
    ids = files["added_tokens.json"]
    files["generation_config.json"] = {
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": False,
    }
    return files


def _replace(path: Path, content: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")  # every worker writes them
    aside.write_bytes(content)
    os.replace(aside, path)
