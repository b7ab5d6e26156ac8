"""What holds for the repository as a whole: its folders, its generated code, and the names that it may not share."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: The fixed top level (ARCHITECTURE.md): packages, and the folders beside them.
PACKAGES = {"protos", "core", "kernels", "connectors", "engine", "services", "router", "cli"}
FOLDERS = PACKAGES | {"k8s", "tests", "demo", "benchmarks", "docs", "examples"}


def test_the_top_level_is_the_fixed_one() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode == 0:
        there = {Path(name).parts[0] for name in tracked.stdout.splitlines() if "/" in name}
    else:  # unpacked from an archive
        there = {path.name for path in ROOT.iterdir() if path.is_dir()}
    there = {name for name in there if not name.startswith(".") and not name.endswith(".egg-info")}
    assert there - {"__pycache__"} <= FOLDERS, "a new folder belongs into ARCHITECTURE.md first"
    assert {name for name in PACKAGES if (ROOT / name / "__init__.py").is_file()} == PACKAGES


def test_architecture_has_a_row_for_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert [name for name in sorted(PACKAGES) if f"`{name}/" not in text] == []


def test_the_stages_are_the_three_deployables() -> None:
    stages = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    assert stages == {"encoder", "prefill", "decode"}


def test_every_package_has_its_floor() -> None:
    """A package that import-linter does not know may import anything."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert set(settings["root_packages"]) == PACKAGES


def test_generated_code_is_what_the_protos_say(tmp_path: Path) -> None:
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
    assert sources
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    made = {path.name: path.read_bytes() for path in (tmp_path / "protos").iterdir()}
    kept = {path.name: path.read_bytes() for path in (ROOT / "protos").glob("*_pb2*") if path.is_file()}
    assert sorted(made) == sorted(kept), "run `make protos`"
    assert [name for name in made if made[name] != kept[name]] == [], "run `make protos`"


def test_no_stranger_is_named_kernels() -> None:
    """`transformers` imports a distribution of that name where it is installed, and would find our folder instead."""
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.distribution("kernels")


def test_kernels_init_holds_no_code() -> None:
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)
    assert isinstance(body[0].value.value, str)
