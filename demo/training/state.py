"""The state of a training run as one file that is whole or absent, so that a run can be stopped anywhere and go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def save_state(path: Path, module: torch.nn.Module, optimizers: dict[str, Any], progress: dict[str, Any]) -> None:
    """Write weights, the optimizers' memories, and `progress`, which must be JSON."""
    tensors = {f"weight/{name}": tensor for name, tensor in _weights(module).items()}
    for name, optimizer in optimizers.items():
        for number, memory in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{name}/{number}/{key}": torch.as_tensor(value) for key, value in memory.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, aside, metadata={"progress": json.dumps(progress)})
    os.replace(aside, path)


def load_state(path: Path, module: torch.nn.Module, optimizers: dict[str, Any]) -> dict[str, Any]:
    """Put back what `save_state` wrote; returns `progress`. The optimizers must be made of the same parameters."""
    memories: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in optimizers}
    weights = _weights(module)
    with safe_open(path, "pt") as file, torch.no_grad():
        progress: dict[str, Any] = json.loads(file.metadata()["progress"])
        for full in file.keys():  # noqa: SIM118 - no mapping
            kind, name = full.split("/", 1)
            if kind == "weight":
                weights[name].copy_(file.get_tensor(full))
            else:
                optimizer, number, key = name.split("/")
                memories[optimizer].setdefault(int(number), {})[key] = file.get_tensor(full)
    for name, optimizer in optimizers.items():
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": memories[name], "param_groups": groups})
    return progress


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter once, even where two modules share it."""
    return dict(module.named_parameters())
