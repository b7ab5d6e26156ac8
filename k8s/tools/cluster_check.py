"""`make cluster-check`: the rendered manifests, run with podman, asked about pictures while pods come and go.

    python -m k8s.tools.cluster_check [default] [e-pd] [all-in-one] [shared-storage] [bad-input]

Each topology is started and asked; then, with questions going on all the time, every stateless workload is rolled, the
stages are scaled, Redis is restarted, and containers are killed, with replicas and without. `bad-input` is what an
operator may get wrong. Ends with exit code 1 at the first thing that does not hold. Needs podman, root, and the images
of `make image`.
"""

from __future__ import annotations

import functools
import signal
import sys
import time

import click
import grpc

from cli.client import describe
from k8s.tools.bad_input import check_bad_input
from k8s.tools.check import Check, CheckError
from k8s.tools.image_check import ImageError, check_images
from k8s.tools.manifests import ManifestError, overlays, render, workloads
from k8s.tools.picture_load import PictureLoad
from k8s.tools.podman import PodmanError
from k8s.tools.podman_cluster import PodmanCluster

TOPOLOGIES = ("default", "e-pd", "all-in-one", "shared-storage")
_BAD_INPUT = "bad-input"
_GRPC_PORT = 50060
_STAGES = ("encoder", "prefill", "decode")
_SEED = 5
_KILLS = 4


def check_topology(name: str) -> None:
    """Raises CheckError, PodmanError or ManifestError where something does not hold. Everything is gone afterwards."""
    print(f"{name}: starting", flush=True)
    began = time.monotonic()
    with PodmanCluster(overlays()[name]) as cluster:
        print(f"  left out: {', '.join(cluster.left_out)}; topology spread")
        for difference in cluster.differs:
            print(f"  {difference}")
        print(f"  {len(cluster.all_pods())} pods ready after {time.monotonic() - began:.0f} s", flush=True)
        load = PictureLoad(lambda: cluster.endpoints("router"), _GRPC_PORT, seed=_SEED)
        check = Check(cluster, load)
        print(f"  {check.rehearse()} questions about pictures answered rightly", flush=True)
        check.no_failures_counted()
        stages = [each for each in _STAGES if each in cluster.workloads]
        encodes, others = stages[0], stages[1:]
        grown = {encodes: 3} | dict.fromkeys(others, 2)
        with load:
            for workload in ("router", *stages):
                check.step(f"roll {workload}", functools.partial(cluster.roll, workload))
            if "redis" in cluster.workloads:
                check.step("restart redis", lambda: cluster.restart("redis"))
            check.step(_scaling(grown, "to"), lambda: cluster.scale(grown))
            check.kill_replicas(_SEED, _KILLS)
            check.step(_scaling(grown, "from"), lambda: cluster.scale(dict.fromkeys(stages, 1)))
            check.kill_singles(_SEED, _KILLS)
    print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)


def _scaling(replicas: dict[str, int], way: str) -> str:
    return ", ".join(f"{name} {way} {count}" for name, count in replicas.items())


@click.command()
@click.argument("names", nargs=-1, type=click.Choice((*TOPOLOGIES, _BAD_INPUT)))
def main(names: tuple[str, ...]) -> None:
    """Run the rendered manifests with podman and try them."""
    began = time.monotonic()
    # As an exception, so that no container is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        parts = {workload.name: workload for workload in workloads(render(overlays()["default"]))}
        print("images", flush=True)
        check_images(parts["router"], parts["encoder"])
        for name in names or (*TOPOLOGIES, _BAD_INPUT):
            if name == _BAD_INPUT:
                check_bad_input()
            else:
                check_topology(name)
    except (CheckError, ImageError, PodmanError, ManifestError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except grpc.RpcError as error:
        print(f"error: a request failed: {describe(error)}", file=sys.stderr)
        sys.exit(1)
    print(f"cluster-check passed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
