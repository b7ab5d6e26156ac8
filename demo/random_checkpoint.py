"""Makes a small random-weight checkpoint that is laid out like one downloaded from the Hugging Face hub.

    python -m demo.random_checkpoint DIR [--family qwen3_vl] [--preset tiny|bench] [--seed N] [--dtype D] [--scale X]

Families are `qwen3_vl`, `qwen2_5_vl`, `qwen2_vl` and `llava`.

Random matrices at the usual deviation make a model that repeats one token whatever the picture, so that equal tokens
prove nothing. `scale` multiplies the deviation; at 8 greedy output varies, and depends on every image and on their
order.

What tells one family from another is in `demo/checkpoint_families.py`; weights, shards and index are the same for all.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from transformers import AutoConfig, AutoModelForImageTextToText

from core.errors import EXIT_CONFIG, ConfigError
from demo.checkpoint_families import FAMILIES, PRESETS, Family

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_checkpoint(
    directory: Path,
    *,
    family: str = "qwen3_vl",
    preset: str = "tiny",
    seed: int = 0,
    dtype: str = "float32",
    scale: float = 8.0,
) -> Path:
    """Write a checkpoint and return its folder. The same arguments give the same weights, byte for byte.

    The files are written into a folder beside it that is renamed at the end, so `directory` is whole or absent.

    Raises:
        ConfigError: an unknown family, preset or dtype, a scale that is no positive number, or `directory` holds
            something already.
    """
    for name, value, known in (
        ("--family", family, FAMILIES),
        ("--preset", preset, PRESETS),
        ("--dtype", dtype, _DTYPES),
    ):
        if value not in known:
            raise ConfigError(name, value, f"supported are {', '.join(known)}")
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError("--scale", scale, "must be a positive number")
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError("DIR", str(directory), "exists already and is not an empty folder")
    directory.parent.mkdir(parents=True, exist_ok=True)

    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        sizes = PRESETS[preset]
        kind = FAMILIES[family]
        tokenizer = kind.train_tokenizer(sizes.tokenizer_size)
        _write_tokenizer(aside, tokenizer, kind.chat_template)
        for name, content in kind.configs(sizes, tokenizer, dtype).items():
            _write_json(aside / name, content)
        _write_weights(aside, kind, seed=seed, dtype=_DTYPES[dtype], scale=scale, shard_bytes=sizes.shard_bytes)
        aside.chmod(0o755)  # mkdtemp's own mode shuts out other users
        try:
            aside.rename(directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise ConfigError("DIR", str(directory), "was filled by someone else meanwhile") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, chat_template: str | None) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    if isinstance(tokenizer.decoder, decoders.ByteLevel):  # Llama's kind comes with a tokenizer.model, if anything
        tokenizer.model.save(str(directory))  # vocab.json and merges.txt
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _write_weights(
    directory: Path, family: Family, *, seed: int, dtype: torch.dtype, scale: float, shard_bytes: int
) -> None:
    """Safetensors shards and their index for the model that `directory`'s config.json describes.

    Names and shapes come from transformers' own class; one shard at a time is in memory.
    """
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes = {family.hub_name(name): tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
    deviation = config.get_text_config().initializer_range * scale

    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size_bytes = shape.numel() * dtype.itemsize
        if shards[-1] and filled + size_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size_bytes

    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _random_tensor(name, shapes[name], seed, deviation).to(dtype) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)  # safetensors writes for the owner alone; downloaded files are for all
        weight_map.update(dict.fromkeys(names, file))
    total_size = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _random_tensor(name: str, shape: torch.Size, seed: int, deviation: float) -> torch.Tensor:
    """A weight that depends on its name and the seed alone: matrices of `deviation`, gains near 1, small biases."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    if len(shape) > 1:
        return values.mul_(deviation)
    if name.endswith("bias"):
        return values.mul_(0.02)
    return values.mul_(0.05).add_(1.0)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo.random_checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--family", default="qwen3_vl", help=", ".join(FAMILIES))
    parser.add_argument("--preset", default="tiny", help=", ".join(PRESETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", help=", ".join(_DTYPES))
    parser.add_argument("--scale", type=float, default=8.0, help="times the usual deviation of the weights")
    options = parser.parse_args(arguments)
    print(f"making a {options.preset} {options.family} checkpoint in {options.directory}", file=sys.stderr)
    try:
        path = make_checkpoint(
            options.directory,
            family=options.family,
            preset=options.preset,
            seed=options.seed,
            dtype=options.dtype,
            scale=options.scale,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    size_bytes = sum(file.stat().st_size for file in os.scandir(path))
    print(f"wrote {size_bytes / 1e6:.1f} MB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
