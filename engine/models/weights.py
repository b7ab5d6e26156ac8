"""Weights straight from safetensors files: only the tensors a role needs, and a digest over all of them.

A file is mapped, not read: `safe_open` touches the pages of the tensors asked for and no others, so an encoder of a 7B
model reads the vision tower's bytes alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from core.errors import ConfigError

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def weight_files(model_dir: Path) -> list[Path]:
    """The checkpoint's safetensors files in the order of their names. Raises ConfigError where there are none."""
    index = model_dir / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError("--model", str(model_dir), f"{_INDEX} is not a weight index") from None
    else:
        names = [_SINGLE]
    files = [model_dir / name for name in names]
    for file in files:
        if file.parent != model_dir or not file.is_file():
            raise ConfigError("--model", str(model_dir), f"has no weight file {file.name}")
    return files


@dataclass(slots=True)
class LoadReport:
    """What a load touched, in bytes of tensor data."""

    loaded_bytes: int = 0
    skipped_bytes: int = 0


_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def _tensor_bytes(dtype: str, shape: list[int]) -> int:
    size = _ITEM_BYTES.get(dtype, 1)
    for side in shape:
        size *= side
    return size


def tensor_names(files: list[Path]) -> Iterator[str]:
    """Every tensor's name, from the headers alone. Raises ConfigError for a file that is cut short."""
    for file in files:
        with _opened(file) as tensors:
            yield from tensors.keys()


def load_weights(
    files: list[Path],
    targets: dict[str, nn.Module],
    rename: Callable[[str], tuple[str, str] | None],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadReport:
    """Fill the parameters of `targets` (built on the meta device), converted to `dtype` on `device`.

    `rename` maps a tensor's name in the file to (target, parameter name), or None for a tensor that no role needs.

    Raises:
        ConfigError: a parameter without a tensor, a tensor of a target's that is none of its parameters, a shape that
            differs (both are named), or a file that is cut short.
    """
    report = LoadReport()
    parameters = {(t, name): p for t, module in targets.items() for name, p in module.named_parameters()}
    missing = set(parameters)
    model_dir = str(files[0].parent)
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safe_open handle is no mapping
                view = tensors.get_slice(name)
                shape = list(view.get_shape())
                size_bytes = _tensor_bytes(view.get_dtype(), shape)
                place = rename(name)
                if place is None or place[0] not in targets or _is_buffer(targets[place[0]], place[1]):
                    report.skipped_bytes += size_bytes
                    continue
                parameter = parameters.get(place)
                if parameter is None:
                    raise ConfigError("--model", model_dir, f"weight {name} is no part of what config.json describes")
                if list(parameter.shape) != shape:
                    raise ConfigError(
                        "--model",
                        model_dir,
                        f"weight {name} has shape {shape}, the configuration asks for {list(parameter.shape)}",
                    )
                # A copy of our own: the mapping goes away with the file, and a file that is overwritten while we
                # serve must not change our weights.
                tensor = tensors.get_tensor(name).to(device=device, dtype=dtype, copy=True)
                _assign(targets[place[0]], place[1], tensor)
                missing.discard(place)
                report.loaded_bytes += size_bytes
    if missing:
        names = sorted(f"{t}.{name}" for t, name in missing)
        raise ConfigError("--model", model_dir, f"has no weights for {names[0]} ({len(names)} missing)")
    logger.info("weights: %d bytes loaded, %d bytes skipped", report.loaded_bytes, report.skipped_bytes)
    return report


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as error:  # what an empty file raises is no SafetensorError
        reason = " ".join(str(error).split())
        raise ConfigError("--model", str(file.parent), f"{file.name} cannot be read: {reason}") from None


def _is_buffer(module: nn.Module, name: str) -> bool:
    """Older checkpoints hold rotary frequencies and position numbers, which are computed."""
    return name.endswith(".inv_freq") or name in dict(module.named_buffers())


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))


def real_buffers(model: Any, device: torch.device) -> None:
    """Give the buffers of a transformers model that was built on the meta device their values.

    They are not in the checkpoint (rotary frequencies). transformers' own `_init_weights` computes them, module by
    module.
    """
    for module in model.modules():
        buffers = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in buffers:
            meta = module.get_buffer(name)
            made = torch.full_like(meta, _unset(meta.dtype), device=device)
            module.register_buffer(name, made, persistent=False)
        if buffers:
            model._init_weights(module)
        for name in buffers:
            buffer = module.get_buffer(name)
            if (buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer.dtype)).any():
                raise RuntimeError(f"transformers left buffer {name} of {type(module).__name__} without a value")


def _unset(dtype: torch.dtype) -> float:
    """What no buffer holds once it has its value."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def weights_digest(model_dir: Path, files: list[Path], cache_dir: Path | None = None) -> str:
    """BLAKE3 over the configuration and every weight file, 64 hexadecimal digits.

    A file's digest is remembered beside its size and time of change, so that a start does not read a large checkpoint
    twice. The memory is a hint: where it cannot be read or written, or has no place, the digest is computed.
    """
    from blake3 import blake3  # a machine that only runs models has none

    hasher = blake3((model_dir / "config.json").read_bytes())
    cache_dir = cache_dir or _default_cache_dir()
    for file in files:
        hasher.update(file.name.encode() + b"\0" + _file_digest(file, cache_dir).encode())
    return hasher.hexdigest()


def _default_cache_dir() -> Path | None:
    """Within the user's cache folder; None for a user without one. As XDG has it, a relative path counts as unset."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "triptych" / "digests" if root.is_absolute() else None


def _file_digest(file: Path, cache_dir: Path | None) -> str:
    from blake3 import blake3

    stat = file.stat()
    entry = None if cache_dir is None else cache_dir / f"{blake3(str(file.resolve()).encode()).hexdigest()}.json"
    if entry is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(entry.read_bytes())
            if (known["size_bytes"], known["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns):
                return str(known["digest"])
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(file)
    digest = hasher.hexdigest()
    if entry is not None:
        try:
            _remember(entry, {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "digest": digest})
        except OSError as error:
            logger.warning("the digest of %s is not remembered: %s", file.name, error.strerror)
    return digest


def _remember(entry: Path, known: dict[str, int | str]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    aside = tempfile.NamedTemporaryFile(dir=entry.parent, delete=False)  # noqa: SIM115 - closed below
    try:
        with aside:
            aside.write(json.dumps(known).encode())
        os.replace(aside.name, entry)
    except BaseException:
        Path(aside.name).unlink(missing_ok=True)
        raise
