"""Triton's kernels run under its interpreter here: on the CPU, one program after the other.

Whether a kernel is interpreted is decided where `triton` and then the kernel's module are imported. So both are
imported here, with the variable set, and it is taken away again: neither the other tests of this process nor their
child processes are to see it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import pytest
import torch

import kernels

_VARIABLE = "TRITON_INTERPRET"


def _import_interpreted() -> None:
    # transformers imports PyTorch's compiler, and that imports triton. What was imported without the variable is
    # forgotten, but for the part in C++: a process loads it once.
    for name, module in list(sys.modules.items()):
        is_python = name.partition(".")[0] == "triton" and not name.startswith("triton._C")
        if is_python or (name.startswith("kernels.") and hasattr(module, "triton")):
            del sys.modules[name]
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        # The first launch imports this one, and it refuses interpreted functions without the variable.
        importlib.import_module("triton.experimental.gluon")
        for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
            importlib.import_module(found.name)
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


_import_interpreted()


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher allocates and does not write is NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            tensor.fill_(torch.nan)
        return tensor

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison(empty_like(*args, **kwargs)))
