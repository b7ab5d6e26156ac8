"""What tells the families of random checkpoints apart: tokenizer, configuration files, chat template, weight names.

A family is one entry of `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from demo import llava_checkpoints, qwen_checkpoints
from demo.checkpoint_sizes import PRESETS, Json, Preset
from demo.checkpoint_text import LLAVA_CHAT_TEMPLATE, QWEN_CHAT_TEMPLATE
from demo.checkpoint_tokenizers import train_llava_tokenizer, train_qwen_tokenizer

__all__ = ["FAMILIES", "PRESETS", "Family", "train_llava_tokenizer", "train_qwen_tokenizer"]


@dataclass(frozen=True, slots=True)
class Family:
    """How one family's checkpoints are made."""

    train_tokenizer: Callable[[int], Tokenizer]  # of exactly so many tokens
    configs: Callable[[Preset, Tokenizer, str], dict[str, Json]]  # (sizes, tokenizer, dtype) -> files by name
    chat_template: str | None  # for chat_template.jinja; None where it stands in other files
    hub_name: Callable[[str], str]  # parameter of transformers' class -> its name in published files


FAMILIES: dict[str, Family] = {
    "qwen3_vl": Family(train_qwen_tokenizer, qwen_checkpoints.qwen3_vl, QWEN_CHAT_TEMPLATE, str),
    "qwen2_5_vl": Family(train_qwen_tokenizer, qwen_checkpoints.qwen2_5_vl, None, qwen_checkpoints.hub_name),
    "qwen2_vl": Family(train_qwen_tokenizer, qwen_checkpoints.qwen2_vl, None, qwen_checkpoints.hub_name),
    "llava": Family(train_llava_tokenizer, llava_checkpoints.llava, LLAVA_CHAT_TEMPLATE, llava_checkpoints.hub_name),
}
