"""Compiles what the launchers launch, for a GPU that is not there: `python -m tests.kernels.compile_kernels sm_90`.

The launchers run as they do in the engine, on CPU tensors. Triton is told of a device of the target's kind, and each
launch ends when its kernel is compiled. So what is compiled is what would be launched: argument types, constants,
divisibility, warps and stages. Prints one JSON object a kernel, then one `{"not_launched": [...]}`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_VARIANTS_FOR = "sm_90"


class NoDevice:
    """A driver with a target and nothing behind it."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread, what did not fit into them (bytes a thread on NVIDIA, registers on AMD), shared memory."""
    found = {"shared": int(kernel.metadata.shared)}
    if "cubin" in kernel.asm:
        found.update(_cuda_resources(kernel.asm["cubin"]))
    else:
        assembly = kernel.asm["amdgcn"]
        for name, field in (("registers", "vgpr_count"), ("spilled", "vgpr_spill_count")):
            found[name] = int(re.search(rf"\.{field}:\s+(\d+)", assembly)[1])  # type: ignore[index]
    return found


def _cuda_resources(cubin: bytes) -> dict[str, int]:
    """From the compiled code, by the tool that Triton brings along."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", text)[1]),  # type: ignore[index]
        "spilled": int(re.search(r"STACK:(\d+)", text)[1]),  # type: ignore[index]
    }


def main(target: str) -> None:
    torch.manual_seed(0)
    triton.runtime.driver.set_active(NoDevice(TARGETS[target]))
    run = JITFunction.run
    launched: list[tuple[str, Any, float]] = []

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        launched.append((self.fn.__name__, kernel, time.perf_counter() - begin_s))
        return kernel

    JITFunction.run = compile_only
    from tests.kernels.launches import LAUNCHES, VARIANTS

    seen = set()
    for launch, call in {**LAUNCHES, **(VARIANTS if target == _VARIANTS_FOR else {})}.items():
        launched.clear()
        call()
        for name, kernel, took_s in launched:
            seen.add(name)
            print(
                json.dumps({"launch": launch, "kernel": name, "took_s": round(took_s, 2), **resources(kernel)}),
                flush=True,
            )
    defined = set()
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                defined.add(name)
    print(json.dumps({"not_launched": sorted(defined - seen)}))


if __name__ == "__main__":
    main(sys.argv[1])
