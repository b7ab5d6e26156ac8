"""The supported families, and how a model folder becomes an adapter."""

from __future__ import annotations

import json
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
    "qwen2_5_vl": "engine.models.qwen2_5_vl:Qwen25VLAdapter",
    "qwen2_vl": "engine.models.qwen2_vl:Qwen2VLAdapter",
    "llava": "engine.models.llava:LlavaAdapter",
}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_model(model_dir: Path, dtype: str) -> ModelAdapter:
    """An adapter for the checkpoint in `model_dir`, nothing loaded yet. `dtype` "auto" is the checkpoint's own.

    Raises:
        ConfigError: no usable config.json, a family that is not supported (the error names those that are), a
            quantized checkpoint, or an unknown dtype.
    """
    try:
        written = json.loads((model_dir / "config.json").read_bytes())
        family = written["model_type"]
    except FileNotFoundError:
        raise ConfigError("--model", str(model_dir), "has no config.json") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(model_dir, error) from None
    # Before transformers reads it: there are families that it does not know either.
    if family not in FAMILIES:
        raise ConfigError(
            "--model", str(model_dir), f"family {family} is not supported; these are: {', '.join(FAMILIES)}"
        )
    if written.get("quantization_config") is not None:
        raise ConfigError("--model", str(model_dir), "holds quantized weights, which are not supported")
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except Exception as error:  # transformers' checks of a configuration raise whatever they like
        raise _unusable(model_dir, error) from None
    chosen = getattr(config, "dtype", None) if dtype == "auto" else _DTYPES.get(dtype)
    if dtype == "auto" and chosen is None:
        chosen = getattr(config.text_config, "dtype", None) or torch.float32
    if chosen is None:
        raise ConfigError("--dtype", dtype, f"is not one of auto, {', '.join(_DTYPES)}")
    attention.register()
    module, _, name = FAMILIES[family].partition(":")
    adapter: ModelAdapter = getattr(import_module(module), name)(model_dir, config, chosen)
    return adapter


def _unusable(model_dir: Path, error: Exception) -> ConfigError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError("--model", str(model_dir), f"config.json is not usable: {reason[:300]}")
