"""What `make cluster-check` asks of a topology under load: nothing fails, or what fails has a name and ends in time."""

from __future__ import annotations

import random
import re
import time
import urllib.request
from collections.abc import Callable

import grpc
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import engine.stats
import router.metrics
from k8s.tools.picture_load import TIMEOUT_S, PictureLoad, Tally
from k8s.tools.podman_cluster import PodmanCluster
from k8s.tools.pods import Pod

#: Of answers that were right when nothing else was going on: in bf16 a token may turn where two are as likely.
_MOST_WRONG = 0.02
_RECOVERY_S = 90.0
_HTTP_PORT = 8000
_PREFIX = "triptych:"
#: Beyond a request's deadline, until its client has been told.
_LATE_S = 5.0
#: Zero where nothing was broken on purpose.
FAILURES = (*engine.stats.FAILURES, *router.metrics.FAILURES)
#: How a request may end when a part that it cannot do without was killed: the stage is named, or there was no room.
_NAMED = re.compile(r"UNAVAILABLE: (encoder|prefill|decode|router) is unavailable: |RESOURCE_EXHAUSTED: |NO_ENDPOINT: ")
#: What gRPC says to a client whose router is gone.
_ROUTER_GONE = re.compile(
    r"UNAVAILABLE: .*(Socket closed|onnection reset|failed to connect|GOAWAY|Broken pipe|refused)"
)


def is_named(failure: str) -> bool:
    """Of `CODE: details`: whether it says which part could not serve."""
    return _NAMED.match(failure) is not None


def is_router_gone(failure: str) -> bool:
    """Of `CODE: details`: whether it is a client's own, whose router is gone."""
    return not is_named(failure) and _ROUTER_GONE.match(failure) is not None


class CheckError(Exception):
    """What was to hold did not. One line, and the pods' last lines where they may tell more."""


class Check:
    """One topology, with load on it. One thread."""

    def __init__(self, cluster: PodmanCluster, load: PictureLoad) -> None:
        self.cluster = cluster
        self.load = load

    def rehearse(self) -> int:
        """How many questions are answered rightly, each asked once. Raises CheckError if one fails.

        A router may be ready before its workers are: the first question waits for them.
        """
        deadline = time.monotonic() + _RECOVERY_S
        while True:
            try:
                return self.load.rehearse()
            except (grpc.RpcError, LookupError) as error:
                is_waiting = isinstance(error, grpc.RpcError) and "none of its workers serves yet" in str(error)
                if not is_waiting or time.monotonic() > deadline:
                    raise CheckError(f"the first questions failed: {error}\n{self.logs()}") from error
                time.sleep(0.2)  # nothing tells a client when to come again

    def step(self, what: str, act: Callable[[], None], *, requests: int = 4) -> None:
        """`act` under load, until at least so many requests have ended. Raises CheckError if one failed."""
        self._take()
        began = time.monotonic()
        act()
        took_s = time.monotonic() - began
        tally = self._at_least(requests)
        print(f"  {what}: {took_s:.0f} s; {tally}", flush=True)
        if tally.failures:
            raise CheckError(f"{what}: {tally.failures[0]}\n{self.logs()}")
        self._answers_are_right(what, tally)

    def kill_replicas(self, seed: int, kills: int) -> None:
        """SIGKILL to pods, so many at least, of which there are others; the next once the last is ready again.

        Raises CheckError if a request failed, except where the router died that its client was talking to.
        """
        self._take()
        rng = random.Random(seed)
        began = time.monotonic()
        killed: list[Pod] = []
        for pod in self._victims(rng, kills):
            killed.append(pod)
            pod.kill()
            pod.wait_ready(time.monotonic() + _RECOVERY_S)
            self._until_seen()
        tally = self._at_least(6)
        print(f"  {_killed('two of each', seed, killed)}: {time.monotonic() - began:.0f} s; {tally}", flush=True)
        routers = any(pod.workload.name == "router" for pod in killed)
        lost = [failure for failure in tally.failures if not (routers and is_router_gone(failure))]
        if lost:
            raise CheckError(f"another pod could have served it: {lost[0]}\n{self.logs()}")
        self._answers_are_right("kills", tally)

    def _until_seen(self) -> None:
        """Until every router knows all workers to serve, which it finds out for itself."""
        encodes, decodes = (name if name in self.cluster.workloads else "prefill" for name in ("encoder", "decode"))
        stages = {"encode": encodes, "prefill": "prefill", "decode": decodes}
        wanted = {stage: len(self.cluster.pods(name)) for stage, name in stages.items()}
        deadline = time.monotonic() + _RECOVERY_S
        while any(serving_workers(router) != wanted for router in self.cluster.pods("router")):
            if time.monotonic() > deadline:
                raise CheckError(f"not all routers know {wanted} workers to serve\n{self.logs()}")
            time.sleep(0.2)

    def kill_singles(self, seed: int, kills: int) -> None:
        """SIGKILL to pods, so many at least, most of them the only one of their kind, while others may be down.

        Raises CheckError where a failure has no name, comes after its deadline, or goes on after all are ready again.
        """
        self._take()
        rng = random.Random(seed)
        began = time.monotonic()
        killed: list[Pod] = []
        for pod in self._victims(rng, kills):
            killed.append(pod)
            pod.kill()
            time.sleep(rng.uniform(0.5, 3.0))  # what comes next is to meet it dead, or starting
        self.cluster.wait_ready(_RECOVERY_S)
        tally = self._take()
        print(f"  {_killed('one of each', seed, killed)}: {time.monotonic() - began:.0f} s; {tally}", flush=True)
        routers = any(pod.workload.name == "router" for pod in killed)
        for failure in tally.failures:
            if not (is_named(failure) or (routers and is_router_gone(failure))):
                raise CheckError(f"a killed pod gave an error that does not say which: {failure}\n{self.logs()}")
        if tally.slowest_s > TIMEOUT_S + _LATE_S:
            raise CheckError(f"a request ended after {tally.slowest_s:.0f} s, its deadline was {TIMEOUT_S:g} s")
        self._answers_are_right("kills", tally)
        self._until_no_failures()

    def _victims(self, rng: random.Random, kills: int) -> list[Pod]:
        """One pod of each workload at least, in random order."""
        names = list(self.cluster.workloads)
        rng.shuffle(names)
        names += rng.choices(names, k=max(0, kills - len(names)))
        return [rng.choice(self.cluster.pods(name)) for name in names]

    def no_failures_counted(self) -> None:
        """Nothing was made good in silence so far. Raises CheckError that names pod and counter."""
        for pod in self.cluster.all_pods():
            for name, value in metrics_of(pod).items():
                if name in FAILURES and value:
                    raise CheckError(f"{pod.name}: {name} is {value:g} though nothing was broken\n{self.logs()}")

    def _answers_are_right(self, what: str, tally: Tally) -> None:
        if tally.wrong > max(1, _MOST_WRONG * tally.total):
            raise CheckError(f"{what}: {tally.wrong} of {tally.total} answers were wrong")

    def _until_no_failures(self) -> None:
        deadline = time.monotonic() + _RECOVERY_S
        while True:
            self._take()
            tally = self._at_least(6)
            if not tally.failures:
                return
            if time.monotonic() > deadline:
                raise CheckError(f"still failing {_RECOVERY_S:g} s after the last kill: {tally.failures[-1]}")

    def _take(self) -> Tally:
        return self.load.take()

    def _at_least(self, requests: int) -> Tally:
        """What has ended since the last look, once it is so many requests."""
        tally = self._take()
        deadline = time.monotonic() + _RECOVERY_S
        while tally.total < requests:
            if time.monotonic() > deadline:
                raise CheckError(f"no {requests} requests ended within {_RECOVERY_S:g} s: {tally}\n{self.logs()}")
            time.sleep(0.1)
            tally.add(self._take())
        return tally

    def logs(self) -> str:
        """The last lines of every pod."""
        return "\n".join(f"--- {pod.name}\n{pod.log(12)}" for pod in self.cluster.all_pods())


def _killed(which: str, seed: int, pods: list[Pod]) -> str:
    return f"kill at random, {which} (seed {seed}: {', '.join(pod.workload.name for pod in pods)})"


def metrics_of(pod: Pod) -> dict[str, float]:
    """What its /metrics says, as `scrape` does; nothing for a pod that has none."""
    ports = {port["name"]: int(port["containerPort"]) for port in pod.workload.container["ports"]}
    port = ports.get("metrics", ports.get("http"))
    return {} if port is None else scrape(pod.address, port)


def serving_workers(router: Pod) -> dict[str, int]:
    """How many workers of each stage a router knows to serve; nothing while it does not answer itself."""
    try:
        samples = _samples(router.address, _HTTP_PORT)
    except OSError:
        return {}
    return {
        sample.labels["stage"]: int(sample.value)
        for sample in samples
        if sample.name == f"{_PREFIX}router_workers" and sample.labels["state"] == "serving"
    }


def scrape(host: str, port: int) -> dict[str, float]:
    """Sums over all series of each of our metrics, by name without prefix."""
    sums: dict[str, float] = {}
    for sample in _samples(host, port):
        if sample.name.startswith(_PREFIX):
            name = sample.name.removeprefix(_PREFIX)
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def _samples(host: str, port: int) -> list[Sample]:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
