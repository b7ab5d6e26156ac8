"""Every kernel compiles for GPUs, as it would be launched there, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent.parent
#: A block's shared memory, bytes: of A100, H100 and H200, MI300.
_SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


@pytest.mark.parametrize("target", list(_SHARED_LIMIT))
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    """Each launch of tests/kernels/launches.py, in a process of its own: here the kernels are interpreted."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}  # what is compiled, not what once was
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", target],
        cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    *compiled, last = map(json.loads, done.stdout.splitlines())
    assert last == {"not_launched": []}, "add a launch of it to tests/kernels/launches.py"
    assert compiled
    for each in compiled:
        print(
            f"{target} {each['launch']:56}{each['kernel']:26}{each['registers']:4} registers, "
            f"{each['spilled']:4} spilled, {each['shared']:7} bytes shared, {each['took_s']:5.2f} s"
        )
        assert each["shared"] <= _SHARED_LIMIT[target], each
        # Older Tritons keep a table of the sine's on the stack.
        assert each["spilled"] <= 32, each
