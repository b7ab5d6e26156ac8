"""What autoscalers, alert rules and dashboard ask: of one stack at a time, and the same in both kinds of autoscaler.

That the metrics which they name exist is for `test_local.py`.
"""

from __future__ import annotations

import json
import re

import pytest

from k8s.tools.manifests import K8S, Object

_METRIC = re.compile(r"triptych:\w+(?:\{([^}]*)\})?")
_NAMESPACE = re.compile(r'\bnamespace="([^"]*)"')


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {made["metadata"]["name"]: made for made in objects if made["kind"] == kind}


def hpa_targets(spec: Object) -> list[float]:
    """What each metric is to be at most, a share as one of 1 and CPU in percent."""
    found = []
    for metric in spec["metrics"]:
        target = metric[metric["type"].lower()]["target"]
        text = str(target.get("averageValue", target.get("averageUtilization")))
        found.append(int(text[:-1]) / 1000 if text.endswith("m") else float(text))
    return found


def keda_targets(spec: Object) -> list[float]:
    return [float(each["metadata"].get("threshold", each["metadata"].get("value"))) for each in spec["triggers"]]


def test_both_autoscalers_do_the_same(rendered: dict[str, list[Object]]) -> None:
    """KEDA's cooldownPeriod is for scaling to zero alone; how fast pods go is said to the HPA that it makes."""
    scalers = of_kind(rendered["default+autoscaling-hpa"], "HorizontalPodAutoscaler")
    scaled = of_kind(rendered["default+autoscaling-keda"], "ScaledObject")
    assert scalers.keys() == scaled.keys() == {"router", "encoder", "prefill", "decode"}
    for name, made in scalers.items():
        hpa, keda = made["spec"], scaled[name]["spec"]
        assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"], name
        assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"]), name
        assert keda_targets(keda) == hpa_targets(hpa), name
        assert keda["scaleTargetRef"]["name"] == hpa["scaleTargetRef"]["name"] == name


def test_keda_asks_for_its_own_namespace(rendered: dict[str, list[Object]]) -> None:
    """Prometheus has the pods of all namespaces, and would add them up."""
    asked = 0
    for name, made in of_kind(rendered["default+autoscaling-keda"], "ScaledObject").items():
        for trigger in made["spec"]["triggers"]:
            for selector in _METRIC.findall(trigger["metadata"].get("query", "")):
                assert _NAMESPACE.findall(selector) == [made["metadata"]["namespace"]], name
                asked += 1
    assert asked >= 4


@pytest.fixture
def rules(rendered: dict[str, list[Object]]) -> Object:
    return of_kind(rendered["default+monitoring"], "PrometheusRule")["triptych"]


def alerts(rules: Object) -> dict[str, str]:
    """Expressions by name."""
    return {rule["alert"]: rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]}


def test_rules_look_at_each_namespace_for_itself(rules: Object) -> None:
    """Else a stack that is well would hide another one that is not."""
    for alert, expr in alerts(rules).items():
        if "absent(" in expr:  # what is not there has no labels to group by
            assert _NAMESPACE.findall(expr) == [rules["metadata"]["namespace"]], alert
            continue
        aggregations = re.findall(r"\b(?:sum|max|min|avg|count)\b *(\S* *\([^)]*)", expr)
        assert aggregations, alert
        assert [each for each in aggregations if not each.startswith("by (namespace")] == [], alert


def test_routers_that_are_gone_or_not_scraped_wake_somebody(rules: Object) -> None:
    """All other rules say nothing where there is nothing to compute with."""
    assert "absent(triptych:router_workers{" in "".join(alerts(rules).values())


def test_the_dashboard_shows_the_chosen_namespace() -> None:
    dashboard = json.loads((K8S / "components/monitoring/dashboard.json").read_text())
    assert "namespace" in {variable["name"] for variable in dashboard["templating"]["list"]}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    selectors = [selector for expr in asked for selector in _METRIC.findall(expr)]
    assert len(selectors) >= len(asked) > 20
    assert [each for each in selectors if 'namespace=~"$namespace"' not in each] == []
