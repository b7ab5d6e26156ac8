"""Every kustomization, rendered once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from k8s.tools.manifests import K8S, Object, overlays, render

#: Each of the others is tried on top of the default, which has these.
_IN_DEFAULT = ("images", "network-policy")


def with_component(folder: Path, component: str) -> Path:
    """A kustomization in `folder` that adds a component to the default, as docs/kubernetes.md says that one may.
    kustomize takes relative paths only."""
    made = folder / component
    made.mkdir()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(K8S, made)],
        "components": [os.path.relpath(K8S / "components" / component, made)],
        "namespace": "triptych",
    }
    (made / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return made


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """By name: "default", the overlays, and "default+" with the name of each component that it has not."""
    folder = tmp_path_factory.mktemp("components")
    names = {path.name for path in (K8S / "components").iterdir() if path.is_dir()}.difference(_IN_DEFAULT)
    folders = overlays() | {f"default+{name}": with_component(folder, name) for name in sorted(names)}
    return {name: render(path) for name, path in folders.items()}
