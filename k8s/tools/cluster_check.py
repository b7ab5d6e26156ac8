"""`make cluster-check`: the rendered manifests, run with podman, asked about pictures while pods come and go.

    python -m k8s.tools.cluster_check [default] [e-pd] [all-in-one] [shared-storage]

Each topology is started and asked; then, with questions going on all the time, every stateless workload is rolled, the
encoders are scaled, Redis is restarted, and containers are killed. Ends with exit code 1 at the first thing that does
not hold. Needs podman, root, and the images of `make image`.
"""

from __future__ import annotations

import functools
import random
import signal
import sys
import time
import urllib.request
from collections.abc import Callable

import click
import grpc

from k8s.tools.image_check import ImageError, check_images
from k8s.tools.manifests import ManifestError, overlays, render, workloads
from k8s.tools.picture_load import PictureLoad, Tally
from k8s.tools.podman import PodmanError
from k8s.tools.podman_cluster import PodmanCluster

TOPOLOGIES = ("default", "e-pd", "all-in-one", "shared-storage")
_GRPC_PORT = 50060
_HTTP_PORT = 8000
_STATELESS = ("router", "encoder", "prefill", "decode")
#: Of answers that were right when nothing else was going on: in bf16 a token may turn where two are as likely.
_MOST_WRONG = 0.02
_SEED = 5
_KILLS = 4
_RECOVERY_S = 90.0
#: Zero where nothing was broken on purpose. Others may count what a rolling update makes.
_FAILURES = (
    "ec_load_failures_total",
    "ec_save_failures_total",
    "ec_store_breaker_opens_total",
    "ec_store_tier_failures_total",
    "kv_transfer_failures_total",
    "kv_transfer_retries_total",
    "kv_leases_expired_total",
    "kv_recomputations_total",
    "router_retries_total",
)
#: How a request may end while containers are killed.
_NAMED = ("UNAVAILABLE", "NO_ENDPOINT", "RESOURCE_EXHAUSTED")


class CheckError(Exception):
    """What was to hold did not. One line."""


class Check:
    """One topology, with load on it."""

    def __init__(self, cluster: PodmanCluster, load: PictureLoad) -> None:
        self.cluster = cluster
        self.load = load

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
        if tally.wrong > max(1, _MOST_WRONG * tally.total):
            raise CheckError(f"{what}: {tally.wrong} of {tally.total} answers were wrong")

    def kill_at_random(self, seed: int) -> None:
        """SIGKILL to some pods, one after the other. Failures may be named ones; afterwards all is well again."""
        self._take()
        rng = random.Random(seed)
        for _ in range(_KILLS):
            pod = rng.choice(self.cluster.all_pods())
            pod.kill()
            time.sleep(rng.uniform(0.5, 3.0))  # what comes next is to meet it dead, or starting
        self.cluster.wait_ready(_RECOVERY_S)
        tally = self._take()
        print(f"  kill {_KILLS} pods at random (seed {seed}): {tally}", flush=True)
        strange = [failure for failure in tally.failures if not failure.startswith(_NAMED)]
        if strange:
            raise CheckError(f"a killed pod gave: {strange[0]}")
        self._until_no_failures()

    def no_failures_counted(self) -> None:
        """Nothing was made good in silence so far. Raises CheckError that names pod and counter."""
        for pod in self.cluster.all_pods():
            port = {"router": _HTTP_PORT}.get(pod.workload.name) or next(
                (each["containerPort"] for each in pod.workload.container["ports"] if each["name"] == "metrics"), None
            )
            if port is None:
                continue
            for name, value in scrape(pod.address, port).items():
                if name in _FAILURES and value:
                    raise CheckError(f"{pod.name}: {name} is {value:g} though nothing was broken\n{self.logs()}")

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
            more = self._take()
            tally.right += more.right
            tally.wrong += more.wrong
            tally.failures += more.failures
            tally.slowest_s = max(tally.slowest_s, more.slowest_s)
        return tally

    def logs(self) -> str:
        """The last lines of every pod."""
        return "\n".join(f"--- {pod.name}\n{pod.log(12)}" for pod in self.cluster.all_pods())


def scrape(host: str, port: int) -> dict[str, float]:
    """Sums over all series of each of our metrics, by name without prefix."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("triptych:"):
            name, _, value = line.removeprefix("triptych:").rpartition(" ")
            name = name.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def check_topology(name: str) -> None:
    """Raises CheckError, PodmanError or ManifestError where something does not hold. Everything is gone afterwards."""
    print(f"{name}: starting", flush=True)
    began = time.monotonic()
    with PodmanCluster(overlays()[name]) as cluster:
        print(f"  left out: {', '.join(cluster.left_out)}; topology spread")
        print(f"  {len(cluster.all_pods())} pods ready after {time.monotonic() - began:.0f} s", flush=True)
        load = PictureLoad(lambda: cluster.endpoints("router"), _GRPC_PORT, seed=_SEED)
        check = Check(cluster, load)
        try:
            print(f"  {load.rehearse()} questions about pictures answered rightly", flush=True)
        except (grpc.RpcError, LookupError) as error:
            raise CheckError(f"the first questions failed: {error}\n{check.logs()}") from error
        check.no_failures_counted()
        with load:
            for workload in (each for each in _STATELESS if each in cluster.workloads):
                check.step(f"roll {workload}", functools.partial(cluster.roll, workload))
            encodes = "encoder" if "encoder" in cluster.workloads else "prefill"
            check.step(f"{encodes} from 1 to 3", lambda: cluster.scale(encodes, 3))
            check.step(f"{encodes} from 3 to 1", lambda: cluster.scale(encodes, 1))
            if "redis" in cluster.workloads:
                check.step("restart redis", lambda: cluster.restart("redis"))
            check.kill_at_random(_SEED)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(TOPOLOGIES))
def main(names: tuple[str, ...]) -> None:
    """Run the rendered manifests with podman and try them."""
    began = time.monotonic()
    # As an exception, so that no container is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        parts = {workload.name: workload for workload in workloads(render(overlays()["default"]))}
        print("images", flush=True)
        check_images(parts["router"], parts["encoder"])
        for name in names or TOPOLOGIES:
            check_topology(name)
    except (CheckError, ImageError, PodmanError, ManifestError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"cluster-check passed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
