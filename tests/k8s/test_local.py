"""The rendered containers' commands, started here against loopback: they serve, and emit what dashboards stand on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from demo.answers import TriptychAnswers
from demo.questions import held_out
from k8s.tools.check import FAILURES, scrape
from k8s.tools.manifests import K8S, Object, overlays, programs
from tests.k8s.local_pods import SECRETS, LocalPods

#: Of the overlays; the default is `served`, and gpu is for other machines.
_OTHERS = sorted(set(overlays()).difference({"default", "gpu"}))
_START_S = 20.0


@pytest.fixture(scope="module")
def served(rendered: dict[str, list[Object]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPods]:
    """The default topology, Redis included."""
    pods = LocalPods(rendered["default"], tmp_path_factory.mktemp("pods"))
    try:
        pods.start()
        yield pods
    finally:
        pods.stop()


def right_answers(pods: LocalPods, count: int) -> int:
    asking = TriptychAnswers(f"127.0.0.1:{pods.ports[50060]}")
    try:
        return sum(asking.answer(question) == question.answer for question in held_out(9, count))
    finally:
        asking.close()


def metrics(pods: LocalPods) -> dict[str, dict[str, float]]:
    """By workload."""
    ports = {"router": 8000, "encoder": 9101, "prefill": 9102, "decode": 9103}
    return {name: scrape("127.0.0.1", pods.ports[ports[name]]) for name in pods.children if name in ports}


def test_the_default_serves_pictures_and_nothing_fails(served: LocalPods) -> None:
    assert right_answers(served, 6) >= 5
    found = metrics(served)
    for name, values in found.items():
        assert {each: values.get(each, 0) for each in FAILURES if values.get(each)} == {}, name
    assert found["encoder"]["ec_misses_total"] > 0
    assert found["prefill"]["ec_hits_total"] > 0, "embeddings came from the store"
    assert found["decode"]["kv_transfer_bytes_total"] > 0


def test_probes_find_what_they_ask_for(served: LocalPods, rendered: dict[str, list[Object]]) -> None:
    for workload, _ in programs(rendered["default"]):
        for kind in ("startup", "readiness", "liveness"):
            probe = workload.container[f"{kind}Probe"]["grpc"]
            with grpc.insecure_channel(f"127.0.0.1:{served.ports[probe['port']]}") as channel:
                request = health_pb2.HealthCheckRequest(service=probe["service"])
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"{workload.name}: {kind}"


def names_in(text: str) -> set[str]:
    """Metrics that are named in a query, without prefix; `_bucket` is part of how a histogram is shown."""
    return {name.removesuffix("_bucket") for name in re.findall(r"triptych:(\w+)", text)}


def test_every_metric_that_is_named_is_emitted(served: LocalPods, rendered: dict[str, list[Object]]) -> None:
    """By autoscalers, rules and dashboard; and all that were promised, by somebody."""
    assert right_answers(served, 1) == 1
    emitted = {name for values in metrics(served).values() for name in values}
    emitted |= {name.removesuffix(suffix) for name in emitted for suffix in ("_bucket", "_count")}
    asked = names_in((K8S / "components/monitoring/dashboard.json").read_text())
    for kind in ("HorizontalPodAutoscaler", "ScaledObject", "PrometheusRule"):
        found = [made for objects in rendered.values() for made in objects if made["kind"] == kind]
        assert found, kind
        asked |= names_in(json.dumps(found))
    assert asked - emitted == set()
    assert PROMISED - emitted == set()


#: What people build on: the names that vLLM's users know, and those of the stages.
PROMISED = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("prompt_tokens_total", "generation_tokens_total", "ec_hits_total", "ec_misses_total", "ec_load_seconds"),
    *("ec_save_seconds", "ec_bytes_total", "ec_load_failures_total", "ec_evictions_total", "kv_transfer_seconds"),
    *("kv_transfer_bytes_total", "stage_queue_seconds", "router_retries_total"),
}


def test_histograms_have_seen_something(served: LocalPods) -> None:
    """A name that is listed and never observed would be an empty panel for ever."""
    assert right_answers(served, 2) >= 1
    found = metrics(served)
    for name, where in (
        ("time_to_first_token_seconds", "router"),
        ("time_per_output_token_seconds", "router"),
        ("e2e_request_latency_seconds", "router"),
        ("time_to_first_token_seconds", "prefill"),
        ("time_per_output_token_seconds", "decode"),
        ("e2e_request_latency_seconds", "decode"),
        ("e2e_request_latency_seconds", "encoder"),
        ("stage_queue_seconds", "encoder"),
        ("stage_queue_seconds", "prefill"),
        ("stage_queue_seconds", "decode"),
        ("ec_save_seconds", "encoder"),
        ("ec_load_seconds", "prefill"),
        ("kv_transfer_seconds", "decode"),
    ):
        assert found[where][f"{name}_count"] > 0, f"{where}: {name}"


def test_logs_are_json_lines(served: LocalPods) -> None:
    for name in ("router", "encoder", "prefill", "decode"):
        path = served.children[name].log_path
        assert path is not None
        lines = [line for line in path.read_text().splitlines() if not line.startswith("ready ")]
        assert lines, name
        for line in lines:
            assert {"time", "level", "where", "logger", "message"} <= json.loads(line).keys(), f"{name}: {line}"


@pytest.mark.parametrize("name", _OTHERS)
def test_each_topology_serves_and_ends_well(rendered: dict[str, list[Object]], tmp_path: Path, name: str) -> None:
    """Embeddings by way of the store that it names, in production with a password; Redis is ended by SIGTERM too."""
    pods = LocalPods(rendered[name], tmp_path)
    try:
        pods.start()
        assert right_answers(pods, 3) >= 2
        found = metrics(pods)
    finally:
        codes = pods.stop()
    assert set(codes.values()) == {0}, codes
    assert {(each, failed) for each, values in found.items() for failed in FAILURES if values.get(failed)} == set()
    if "encoder" in pods.children:
        assert found["prefill"]["ec_hits_total"] > 0, "embeddings came from the store"


@pytest.fixture
def production(rendered: dict[str, list[Object]], tmp_path: Path) -> Iterator[LocalPods]:
    """Without a process so far."""
    pods = LocalPods(rendered["production"], tmp_path)
    yield pods
    pods.stop()


def ping(pods: LocalPods, password: str | None, *, wait_s: float = 0) -> bool:
    """Whether Redis takes the password, once it is there. Raises redis's own errors where it does not."""
    retry = Retry(ConstantBackoff(0.02), int(wait_s / 0.02))
    with Redis(port=pods.ports[6379], password=password, retry=retry) as client:
        return bool(client.ping())


@pytest.mark.parametrize("password", [SECRETS["redis", "password"], "of\ntwo lines\r\n", 'a\\nd "', "€"])
def test_redis_takes_whatever_password_the_secret_has(production: LocalPods, password: str) -> None:
    """Without the line's end: a configuration file has quotes and escapes, and one line each."""
    child = production.start_one("redis", {"REDISCLI_AUTH": password})
    assert ping(production, password.rstrip("\r\n"), wait_s=_START_S)
    with pytest.raises(AuthenticationError):
        ping(production, None)
    assert Path(f"/proc/{child.process.pid}/comm").read_text().strip() == "redis-server", "it gets SIGTERM itself"


@pytest.mark.parametrize("password", ["", "\r\n"])
def test_a_secret_without_a_password_is_one_line_and_exit_code_2(production: LocalPods, password: str) -> None:
    """Else Redis would ask for none."""
    child = production.start_one("redis", {"REDISCLI_AUTH": password})
    assert child.wait_ended(time.monotonic() + _START_S)
    assert (child.process.returncode, child.tail()) == (2, ["error: key password of the Secret redis is empty"])


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("encoder", {"TRIPTYCH_MODEL": "/models/none"}, "--model='/models/none': not a folder"),
        ("decode", {"REDIS_PASSWORD": None}, "REDIS_PASSWORD"),
        ("prefill", {"TRIPTYCH_EC_CONNECTOR_EXTRA_CONFIG": "{"}, "--ec-connector-extra-config"),
        ("router", {"TRIPTYCH_ENCODER": "dns:encoder"}, "--encoder"),
    ],
)
def test_what_is_wrong_at_the_start_is_one_line_and_exit_code_2(
    rendered: dict[str, list[Object]], tmp_path: Path, name: str, changed: dict[str, str | None], said: str
) -> None:
    child = LocalPods(rendered["production"], tmp_path).start_one(name, changed)
    assert child.wait_ended(time.monotonic() + 60)
    lines = child.tail()
    assert child.process.returncode == 2, lines
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]
