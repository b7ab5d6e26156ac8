"""Pods that are replaced: what must hold so that no request fails by it."""

from __future__ import annotations

from k8s.tools.manifests import Object, programs
from k8s.tools.podman_cluster import settle_s
from router.settings import RouterSettings
from tests.k8s.test_policy import env_of

_DNS_CACHE_S = 30  # what Kubernetes' stock configuration of CoreDNS says
_DNS_INTERVAL_S = RouterSettings(encoders=(), prefills=(), decodes=()).dns_interval_s
_DNS_JITTER = 1.2  # router/discovery.py
_ENGINE_STOP_S = 30  # services/runtime.py gives the engine so long after the drain


def test_an_old_pod_goes_once_every_router_knows_the_new_one(rendered: dict[str, list[Object]]) -> None:
    """A cluster's resolvers may have looked just before the new pod was there, and so may a router."""
    for name, objects in rendered.items():
        stages = {workload.name for workload, module in programs(objects) if module != "router"}
        router = next(workload for workload, module in programs(objects) if module == "router")
        interval_s = float(env_of(router, objects).get("TRIPTYCH_DNS_INTERVAL", _DNS_INTERVAL_S))
        for made in objects:
            if made["kind"] == "Deployment" and made["metadata"]["name"] in stages:
                spec, where = made["spec"], f"{name}: {made['metadata']['name']}"
                assert spec["minReadySeconds"] >= _DNS_CACHE_S + _DNS_JITTER * interval_s, where
                assert spec["progressDeadlineSeconds"] > spec["minReadySeconds"], where
                assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}, where


def test_an_unready_pod_keeps_no_node_from_being_drained(rendered: dict[str, list[Object]]) -> None:
    budgets = [made for objects in rendered.values() for made in objects if made["kind"] == "PodDisruptionBudget"]
    assert {made["spec"].get("unhealthyPodEvictionPolicy") for made in budgets} == {"AlwaysAllow"}


def test_cluster_check_waits_until_routers_have_asked_again(rendered: dict[str, list[Object]]) -> None:
    """podman's names are not cached, so that is all that there is to wait for."""
    for workload, module in programs(rendered["default"]):
        assert settle_s(workload) == (0 if module == "router" else _DNS_JITTER * _DNS_INTERVAL_S), workload.name


def test_a_pod_has_time_for_the_longest_request(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        longest_s = {
            float(env_of(workload, objects)["TRIPTYCH_REQUEST_TIMEOUT"])
            for workload, module in programs(objects)
            if module == "router"
        }
        for workload, _ in programs(objects):
            where = f"{name}: {workload.name}"
            drain_s = float(env_of(workload, objects)["TRIPTYCH_DRAIN_TIMEOUT"])
            pause_s = float(workload.container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert drain_s >= max(longest_s), where
            assert workload.pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + _ENGINE_STOP_S, where
