"""What holds for every pod, Service and policy, in every topology."""

from __future__ import annotations

import json
import re
from typing import Any

from core.health import LIVENESS
from k8s.tools.manifests import K8S, Object, Workload, programs, size_bytes, workloads

#: gRPC services by module: what a readiness probe may ask each program.
_SERVICES = {
    "router": {"triptych.v1.Router"},
    "services.encoder": {"triptych.v1.Encoder"},
    "services.prefill": {"triptych.v1.Prefill"},
    "services.decode": {"triptych.v1.Decode"},
}
_RESERVED_BYTES = 256 << 20  # of a router's memory: itself, requests and answers


def containers(objects: list[Object]) -> list[tuple[str, Object]]:
    return [
        (f"{workload.name}/{each['name']}", each)
        for workload in workloads(objects)
        for each in (*workload.pod["containers"], *workload.pod.get("initContainers", ()))
    ]


def env_of(workload: Workload, objects: list[Object]) -> dict[str, str]:
    maps = {made["metadata"]["name"]: made["data"] for made in objects if made["kind"] == "ConfigMap"}
    made: dict[str, str] = {}
    for source in workload.container.get("envFrom", ()):
        made.update(maps[source["configMapRef"]["name"]])
    return made


def options_of(container: Object) -> dict[str, str]:
    return dict(arg.removeprefix("--").split("=", 1) for arg in container["args"] if arg.startswith("--"))


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    return all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))


def test_pods_meet_the_restricted_standard(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        for workload in workloads(objects):
            pod, where = workload.pod, f"{name}: {workload.name}"
            assert pod["securityContext"]["runAsNonRoot"] is True, where
            assert pod["securityContext"]["runAsUser"] >= 999, where
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
            assert pod["automountServiceAccountToken"] is False, where
            # Else a Service named `router` would set variables that our programs take for options.
            assert pod["enableServiceLinks"] is False, where
            assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), where
            assert all("hostPath" not in volume for volume in pod["volumes"]), where
        for where, container in containers(objects):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, f"{name}: {where}"


def test_resources_are_set_and_images_pinned(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        for where, container in containers(objects):
            for section in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][section].keys(), f"{name}: {where}"
            assert re.search(r":\d[\w.-]*$", container["image"]), f"{name}: {where}: {container['image']}"
    texts = [path.read_text() for path in K8S.rglob("*.yaml") if "components/images" not in path.as_posix()]
    assert [text for text in texts if re.search(r"image: *\S+:", text) or "newTag" in text] == [], "one place only"


def test_selectors_match(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        pods = {workload.name: workload for workload in workloads(objects)}
        for made in objects:
            where = f"{name}: {made['kind']} {made['metadata']['name']}"
            spec = made.get("spec", {})
            if made["kind"] in ("Deployment", "StatefulSet"):
                assert matches(spec["selector"], spec["template"]["metadata"]["labels"]), where
                for spread in spec["template"]["spec"].get("topologySpreadConstraints", ()):
                    assert matches(spread["labelSelector"], spec["template"]["metadata"]["labels"]), where
            elif made["kind"] == "Service":
                chosen = [each for each in pods.values() if spec["selector"].items() <= each.labels.items()]
                assert len(chosen) == 1, where
                ports = {port["name"]: port["containerPort"] for port in chosen[0].container["ports"]}
                for port in spec["ports"]:
                    assert ports[port["targetPort"]] == port["port"], where
            elif made["kind"] == "PodDisruptionBudget":
                assert sum(matches(spec["selector"], each.labels) for each in pods.values()) == 1, where
            elif made["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
                assert spec["scaleTargetRef"]["name"] in pods, where
                assert "replicas" not in next(
                    each["spec"]
                    for each in objects
                    if (each["kind"] == "Deployment" and each["metadata"] == made["metadata"])
                    or (each["kind"] == "Deployment" and each["metadata"]["name"] == spec["scaleTargetRef"]["name"])
                ), f"{where}: each apply would undo the autoscaler"
            elif made["kind"] == "ServiceMonitor":
                services = [
                    each
                    for each in objects
                    if each["kind"] == "Service" and matches(spec["selector"], each["metadata"]["labels"])
                ]
                assert services, where
                for endpoint in spec["endpoints"]:
                    for service in services:
                        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}, where


def test_stateful_sets_have_their_service_and_stages_are_headless(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        services = {made["metadata"]["name"]: made for made in objects if made["kind"] == "Service"}
        for made in objects:
            if made["kind"] == "StatefulSet":
                assert made["spec"]["serviceName"] in services, name
        for workload, module in programs(objects):
            if module != "router":
                assert services[workload.name]["spec"]["clusterIP"] == "None", name
                # Else one that starts again would be known half a minute after it serves, by DNS caches.
                assert services[workload.name]["spec"]["publishNotReadyAddresses"] is True, name


def test_probes_ask_what_the_programs_answer(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        for workload, module in programs(objects):
            container, where = workload.container, f"{name}: {workload.name}"
            startup, readiness, liveness = (container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
            port = int(options_of(container)["port"])
            assert {each["grpc"]["port"] for each in (startup, readiness, liveness)} == {port}, where
            assert readiness["grpc"]["service"] in _SERVICES[module], where
            assert startup["grpc"]["service"] in _SERVICES[module] | {LIVENESS}, where
            # One that asked for readiness would end a pod that loads its model or drains.
            assert liveness["grpc"]["service"] == LIVENESS, where
            assert len({json.dumps(each, sort_keys=True) for each in (startup, readiness, liveness)}) == 3, where
            if module != "router":
                # Its front may be short of CPU for a moment, and then it serves all the same.
                assert readiness["timeoutSeconds"] >= 5, where
                assert readiness["failureThreshold"] >= 3, where


def test_probes_of_all_containers_ask_a_port_that_it_has(rendered: dict[str, list[Object]]) -> None:
    seen = set()
    for name, objects in rendered.items():
        for workload in workloads(objects):
            ports = {port["containerPort"] for port in workload.container["ports"]}
            for kind in ("startup", "readiness", "liveness"):
                probe = workload.container[f"{kind}Probe"]
                seen |= probe.keys() & {"grpc", "exec", "tcpSocket"}
                asked = probe.get("grpc") or probe.get("tcpSocket") or {}
                assert asked.get("port", min(ports)) in ports, f"{name}: {workload.name}: {kind}"
    assert seen == {"grpc", "exec", "tcpSocket"}


def test_declared_ports_are_the_ones_listened_on(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        for workload, module in programs(objects):
            options, where = options_of(workload.container), f"{name}: {workload.name}"
            ports = {port["name"]: port["containerPort"] for port in workload.container["ports"]}
            assert ports.pop("grpc") == int(options["port"]), where
            if module == "router":
                assert ports.pop("http") == int(options["http-port"]), where
            else:
                assert ports.pop("metrics") == int(options["metrics-port"]), where
            if "kv" in ports:
                extra = json.loads(env_of(workload, objects)["TRIPTYCH_KV_CONNECTOR_EXTRA_CONFIG"])
                assert ports.pop("kv") == extra["port"], where
            assert not ports, where


def test_memory_that_options_promise_fits_the_limits(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        maps = {made["metadata"]["name"].split("-")[0]: made["data"] for made in objects if made["kind"] == "ConfigMap"}
        for workload in workloads(objects):
            limit = size_bytes(workload.container["resources"]["limits"]["memory"])
            if workload.name == "redis":
                found = re.search(r"^maxmemory (\d+)mb$", maps["redis"]["redis.conf"], re.MULTILINE)
                assert found is not None
                assert int(found[1]) << 20 <= limit * 0.75, f"{name}: no room for fragmentation and connections"
                assert "maxmemory-policy allkeys-lru" in maps["redis"]["redis.conf"]
            elif workload.name == "router":
                held = int(env_of(workload, objects)["TRIPTYCH_MAX_IMAGE_BYTES_HELD"])
                assert held + _RESERVED_BYTES <= limit, name
            else:
                shm = next(volume for volume in workload.pod["volumes"] if volume["name"] == "shm")
                assert shm["emptyDir"]["medium"] == "Memory"
                shm_bytes = size_bytes(shm["emptyDir"]["sizeLimit"])
                assert shm_bytes <= limit / 4, name
                env = env_of(workload, objects)
                if env["TRIPTYCH_EC_CONNECTOR"] == "ECSharedMemoryConnector":
                    assert json.loads(env["TRIPTYCH_EC_CONNECTOR_EXTRA_CONFIG"])["capacity_bytes"] < shm_bytes, name


def test_peers_are_told_the_pods_own_address(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        for workload, module in programs(objects):
            if module == "router":
                continue
            env = {each["name"]: each for each in workload.container["env"]}
            assert env["TRIPTYCH_ADVERTISE_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP", name
            assert options_of(workload.container)["host"] == "0.0.0.0", name


def test_a_change_of_configuration_rolls_the_pods(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        maps = {made["metadata"]["name"] for made in objects if made["kind"] == "ConfigMap"}
        for workload in workloads(objects):
            read = [source["configMapRef"]["name"] for source in workload.container.get("envFrom", ())]
            read += [volume["configMap"]["name"] for volume in workload.pod["volumes"] if "configMap" in volume]
            assert read, f"{name}: {workload.name}"
            for each in read:
                assert each in maps, f"{name}: {workload.name}"
                assert re.search(r"-[a-z0-9]{10}$", each), f"{name}: {workload.name}: {each}"


def test_production_has_a_password_from_a_secret_and_two_of_each(rendered: dict[str, list[Object]]) -> None:
    objects = rendered["production"]
    for workload in workloads(objects):
        secrets = [
            each["valueFrom"]["secretKeyRef"]
            for each in workload.container.get("env", ())
            if "secretKeyRef" in each.get("valueFrom", {})
        ]
        assert secrets == ([] if workload.name == "router" else [{"name": "redis", "key": "password"}]), workload.name
    scalers = [made for made in objects if made["kind"] == "HorizontalPodAutoscaler"]
    assert {made["spec"]["minReplicas"] for made in scalers} == {2}
    budgets = {made["metadata"]["name"] for made in objects if made["kind"] == "PodDisruptionBudget"}
    assert budgets == {"router", "encoder", "prefill", "decode"}


def test_every_way_that_the_stack_needs_is_open(rendered: dict[str, list[Object]]) -> None:
    """Router to stages, stages to each other and to Redis: allowed to leave at one end and to enter at the other."""
    objects = rendered["default"]
    policies = [made["spec"] for made in objects if made["kind"] == "NetworkPolicy"]
    pods = {workload.name: workload for workload in workloads(objects)}

    def allowed(source: Workload, target: Workload, port: dict[str, Any]) -> bool:
        def port_matches(rule: dict[str, Any]) -> bool:
            return "ports" not in rule or any(
                each["port"] in (port["name"], port["containerPort"]) for each in rule["ports"]
            )

        def peer_matches(peers: list[dict[str, Any]] | None, labels: dict[str, str]) -> bool:
            return peers is None or any(
                "podSelector" in each and matches(each["podSelector"], labels) for each in peers
            )

        out = any(
            matches(policy["podSelector"], source.labels)
            and peer_matches(rule.get("to"), target.labels)
            and port_matches(rule)
            for policy in policies
            for rule in policy.get("egress", ())
        )
        into = any(
            matches(policy["podSelector"], target.labels)
            and peer_matches(rule.get("from"), source.labels)
            and port_matches(rule)
            for policy in policies
            for rule in policy.get("ingress", ())
        )
        return out and into

    stages = [pods[name] for name in ("encoder", "prefill", "decode")]
    grpc = {stage.name: stage.container["ports"][0] for stage in stages}
    assert all(allowed(pods["router"], stage, grpc[stage.name]) for stage in stages)
    anything = {"name": "pull", "containerPort": 41234}
    assert all(allowed(one, other, anything) for one in stages for other in stages)
    redis = pods["redis"].container["ports"][0]
    assert all(allowed(stage, pods["redis"], redis) for stage in stages)
    assert not allowed(pods["router"], pods["redis"], redis)
    assert not allowed(pods["redis"], pods["encoder"], grpc["encoder"])
    assert any(policy["podSelector"] == {} and "ingress" not in policy for policy in policies), "default deny"


def test_only_pods_that_fetch_a_model_may_leave_the_cluster(rendered: dict[str, list[Object]]) -> None:
    """Beyond names, which are looked up on port 53."""
    for name, objects in rendered.items():
        ways_out = [
            (made["metadata"]["name"], port["port"])
            for made in objects
            if made["kind"] == "NetworkPolicy"
            for rule in made["spec"].get("egress", ())
            if "to" not in rule
            for port in rule["ports"]
            if port["port"] != 53
        ]
        assert ways_out == ([("stages", 443)] if name == "default+model-fetch" else []), name
