"""The supported families, and how a model folder becomes an adapter."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from transformers import AutoConfig

from core.errors import ConfigError
from engine.models import attention
from engine.models.adapter import ModelAdapter

#: model_type -> "module:class"; imported on use, since each pulls in a part of transformers.
FAMILIES = {
    "qwen3_vl": "engine.models.qwen3_vl:Qwen3VLAdapter",
}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_model(model_dir: Path, dtype: str) -> ModelAdapter:
    """An adapter for the checkpoint in `model_dir`, nothing loaded yet. `dtype` "auto" is the checkpoint's own."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError("--model", str(model_dir), "has no config.json")
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (ValueError, KeyError, OSError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError("--model", str(model_dir), f"config.json is not usable: {reason}") from None
    family = config.model_type
    if family not in FAMILIES:
        raise ConfigError(
            "--model", str(model_dir), f"family {family} is not supported; these are: {', '.join(FAMILIES)}"
        )
    chosen = getattr(config, "dtype", None) if dtype == "auto" else _DTYPES.get(dtype)
    if dtype == "auto" and chosen is None:
        chosen = getattr(config.text_config, "dtype", None) or torch.float32
    if chosen is None:
        raise ConfigError("--dtype", dtype, f"is not one of auto, {', '.join(_DTYPES)}")
    attention.register()
    module, _, name = FAMILIES[family].partition(":")
    adapter: ModelAdapter = getattr(import_module(module), name)(model_dir, config, chosen)
    return adapter
