"""What is rendered is what clusters take: the oldest that we promise, the newest, and the operators' resources."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator, ValidationError

from k8s.tools.manifests import K8S, Object, overlays

OLDEST = "1.29"
NEWEST = kubernetes_validate.latest_version()
_SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")}


def validate(made: Object, version: str) -> None:
    if made["kind"] in _SCHEMAS:
        Draft202012Validator(_SCHEMAS[made["kind"]]).validate(made)
    else:
        kubernetes_validate.validate(made, version, strict=True)


def test_all_topologies_that_are_promised_are_there() -> None:
    promised = {"default", "e-pd", "ep-d", "all-in-one", "shared-storage", "gpu", "production"}
    assert set(overlays()) == promised


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_meets_its_schema(rendered: dict[str, list[Object]], version: str) -> None:
    seen = set()
    for name, objects in rendered.items():
        for made in objects:
            text = json.dumps(made, sort_keys=True)
            if text in seen:  # the same in several overlays
                continue
            seen.add(text)
            try:
                validate(made, version)
            except (kubernetes_validate.ValidationError, ValidationError) as error:
                pytest.fail(f"{name}: {made['kind']} {made['metadata']['name']}: {error}")


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "livenessProbes"), {}),
        ("Deployment", ("spec", "replicas"), "two"),
        ("Service", ("spec", "ports", 0, "targetPorts"), 1),
        ("NetworkPolicy", ("spec", "podSelectors"), {}),
        ("ServiceMonitor", ("spec", "endpoints", 0, "prot"), "http"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "for"), "five minutes"),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 4),
    ],
)
def test_the_schemas_refuse_what_is_wrong(
    rendered: dict[str, list[Object]], kind: str, path: tuple[str | int, ...], value: object
) -> None:
    """Strict: a field that does not exist is one that a cluster would drop in silence."""
    made = copy.deepcopy(next(made for objects in rendered.values() for made in objects if made["kind"] == kind))
    place: Any = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises((kubernetes_validate.ValidationError, ValidationError)):
        validate(made, OLDEST)


def test_each_kustomization_opens_with_its_purpose() -> None:
    files = sorted(K8S.rglob("kustomization.yaml"))
    assert len(files) > 15
    assert [str(path) for path in files if not path.read_text().startswith("# ")] == []


def test_nothing_is_left_to_fill_in_and_nothing_is_secret() -> None:
    for path in K8S.rglob("*.yaml"):
        text = path.read_text()
        assert "${" not in text, path
        assert "kind: Secret" not in text, path
