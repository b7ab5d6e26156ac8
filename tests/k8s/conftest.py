"""Every kustomization, rendered once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from k8s.tools.manifests import K8S, Object, overlays, render

#: Components that no overlay has; each is tried on top of the default.
_ALONE = ("autoscaling-keda", "model-fetch")


def with_component(folder: Path, component: str) -> Path:
    """A kustomization in `folder` that adds a component to the default. kustomize takes relative paths only."""
    made = folder / component
    made.mkdir()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(K8S / "base", made)],
        "components": [
            os.path.relpath(K8S / "components" / name, made) for name in ("network-policy", component, "images")
        ],
        "namespace": "triptych",
    }
    (made / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return made


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """By name: "default", the overlays, and the default with each component that no overlay has."""
    folder = tmp_path_factory.mktemp("components")
    folders = overlays() | {name: with_component(folder, name) for name in _ALONE}
    return {name: render(path) for name, path in folders.items()}
