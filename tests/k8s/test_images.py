"""Dockerfile, `make image` and the manifests name the same images, and whatever is installed is copied into them."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib

import yaml

from k8s.tools.manifests import K8S, Object, workloads

_ROOT = K8S.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())


def copied_by(stage: str) -> set[str]:
    """Folders that this stage of the Dockerfile copies from the checkout."""
    text = (_ROOT / "Dockerfile").read_text()
    found = re.search(rf"^FROM \S+ AS {stage}$(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return set(re.findall(r"^COPY (\w+) \1$", found[1], re.MULTILINE))


def test_the_tag_is_the_version(rendered: dict[str, list[Object]]) -> None:
    """`make image` takes it from pyproject.toml, the manifests from components/images."""
    version = _PROJECT["project"]["version"]
    wanted = {f"triptych-router:{version}", f"triptych-engine:{version}", f"triptych-engine-cuda:{version}"}
    ours = {
        container["image"]
        for objects in rendered.values()
        for workload in workloads(objects)
        for container in workload.pod["containers"]
        if container["image"].startswith("triptych")
    }
    assert ours == wanted


def test_image_sh_finds_the_names_of_others_images() -> None:
    """With sed, in two files; what it does not find would be an empty name."""
    script = (K8S / "tools/image.sh").read_text()
    found = {}
    for variable in ("base", "redis"):
        line = re.search(rf"^{variable}=\$\((sed .*)\)$", script, re.MULTILINE)
        assert line is not None
        done = subprocess.run(shlex.split(line[1]), cwd=_ROOT, capture_output=True, text=True, check=True, timeout=10)
        found[variable] = done.stdout.strip()
    images = yaml.safe_load((K8S / "components/images/kustomization.yaml").read_text())["images"]
    assert found["redis"] == next(each["newTag"] for each in images if each["name"] == "redis")
    assert re.fullmatch(r"debian:\w+-\d{8}-slim", found["base"]), "pinned"


def test_what_is_installed_is_copied() -> None:
    packages = {pattern.rstrip("*") for pattern in _PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert copied_by("engine-packages") == packages
    assert copied_by("router-packages") == {"protos", "core", "router", "cli"}
    allowed = {line.removeprefix("!") for line in (_ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert packages <= allowed
