"""Rendered manifests as podman containers on a bridge network with DNS: the part of a cluster that is not the kubelet.

Services become network aliases of their pods' containers: a pod has its name from its start to its very end, ready or
not, as one of a Service that publishes addresses of pods that are not ready. Left out are the objects of LEFT_OUT and
what pods say about nodes. Everything else that is not understood is an error.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from k8s.tools.manifests import ManifestError, Workload, render, workloads
from k8s.tools.podman import PodmanError, image_exists, podman, remove
from k8s.tools.pods import Place, Pod

LEFT_OUT = frozenset(
    (
        *("Namespace", "NetworkPolicy", "PodDisruptionBudget"),
        *("HorizontalPodAutoscaler", "ScaledObject", "ServiceMonitor", "PrometheusRule"),
    )
)
_UNDERSTOOD = frozenset(("ConfigMap", "Service", "Deployment", "StatefulSet", "PersistentVolumeClaim"))
_READY_S = 150.0
#: By then every router has resolved a name again. podman's names are not cached; those of a cluster are, which is what
#: most of a Deployment's minReadySeconds is for.
_NAMES_S = 6.0
_SUBNETS = 64


def settle_s(workload: Workload) -> float:
    """How long a new pod is to be ready here before an old one goes."""
    return min(workload.min_ready_s, _NAMES_S)


class PodmanCluster:
    """One kustomization, running. Use as a context manager. `roll`, `scale` and `restart` from one thread at a time."""

    def __init__(
        self,
        overlay: Path,
        *,
        later: Collection[str] = (),
        secrets: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        """Workloads named in `later` begin with no pods, for `scale`. `secrets` are those that the cluster has, by name
        and key.

        Raises ManifestError for what does not render or is not understood, PodmanError for an absent image.
        """
        objects = render(overlay)
        unknown = {made["kind"] for made in objects} - LEFT_OUT - _UNDERSTOOD
        if unknown:
            raise ManifestError(f"kinds that cannot be translated: {', '.join(sorted(unknown))}")
        self.left_out = sorted(f"{o['kind']} {o['metadata']['name']}" for o in objects if o["kind"] in LEFT_OUT)
        self.workloads = {workload.name: workload for workload in workloads(objects)}
        waits = {each.min_ready_s for each in self.workloads.values() if settle_s(each) < each.min_ready_s}
        self.differs = [f"minReadySeconds {s:g}: {_NAMES_S:g} here, since podman's names are not cached" for s in waits]
        for workload in self.workloads.values():
            if not image_exists(workload.container["image"]):
                raise PodmanError(f"there is no image {workload.container['image']}; make image, or with BASE=debian")
        self._objects = objects
        self._later = later
        self._secrets = dict(secrets or {})
        self._lock = threading.Lock()
        self._pods: dict[str, list[Pod]] = {name: [] for name in self.workloads}
        self._folder: Path | None = None
        self._place: Place | None = None

    def __enter__(self) -> PodmanCluster:
        self._folder = Path(tempfile.mkdtemp(prefix="triptych-check-"))
        self._folder.chmod(0o755)  # containers read their configuration there as another user
        try:
            self._place = self._make_network(self._folder)
            self._place.secrets.update(self._secrets)
            for name, workload in self.workloads.items():
                for _ in range(0 if name in self._later else workload.replicas):
                    self._add(name)
            self.wait_ready()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clean_up()

    def _make_network(self, folder: Path) -> Place:
        """In the first private subnet, of some, that nobody uses."""
        name = f"triptych-{random.randbytes(3).hex()}"
        for number in random.sample(range(_SUBNETS), _SUBNETS):
            subnet = f"10.213.{number}.0/24"
            with contextlib.suppress(PodmanError):
                podman("network", "create", f"--subnet={subnet}", name)
                return Place(name, subnet.partition("/")[0], folder, self._objects)
        raise PodmanError("no network could be made; `podman network create` says why")

    def pods(self, name: str) -> list[Pod]:
        """Those of a workload that are not on their way out."""
        with self._lock:
            return list(self._pods[name])

    def all_pods(self) -> list[Pod]:
        return [pod for name in self.workloads for pod in self.pods(name)]

    def endpoints(self, name: str) -> list[str]:
        """Addresses of the ready pods of a workload: what a Service of it would send to."""
        return [pod.address for pod in self.pods(name) if pod.ready]

    def wait_ready(self, timeout_s: float = _READY_S) -> None:
        """Raises PodmanError with a pod's last words where not all are ready by then."""
        deadline = time.monotonic() + timeout_s
        for pod in self.all_pods():
            pod.wait_ready(deadline)

    def roll(self, name: str) -> None:
        """Every pod replaced by a new one: one more at a time, and an old one goes once a new one has been ready for a
        while. Raises PodmanError where it does not stay ready."""
        for old in self.pods(name):
            new = self._add(name)
            new.wait_ready(time.monotonic() + _READY_S)
            new.stay_ready(settle_s(new.workload))
            self._retire(old)

    def restart(self, name: str) -> None:
        """Every pod of a StatefulSet replaced: the old one goes first."""
        for old in self.pods(name):
            self._retire(old)
            self._add(name).wait_ready(time.monotonic() + _READY_S)

    def scale(self, replicas: Mapping[str, int]) -> None:
        """More pods of these workloads, or fewer, all at a time: the youngest go first."""
        new = [self._add(name) for name, wanted in replicas.items() for _ in range(wanted - len(self.pods(name)))]
        old = [pod for name, wanted in replicas.items() for pod in self.pods(name)[wanted:]]
        with ThreadPoolExecutor(max_workers=max(1, len(old))) as threads:
            list(threads.map(self._retire, old))
        for pod in new:
            pod.wait_ready(time.monotonic() + _READY_S)

    def add_strange(self, workload: Workload) -> Pod:
        """A pod unlike those of the workload of its name, beside them. `discard` it: it may never be ready."""
        return self._start(workload)

    def fill_claim(self, name: str, archive: Path) -> None:
        """A claim of that name, with what is in a tar file. To be called before a pod mounts it."""
        assert self._place is not None
        volume = self._place.volume(name)
        podman("volume", "create", volume)
        podman("volume", "import", volume, str(archive))

    def discard(self, pod: Pod) -> None:
        """Gone at once, whatever state it is in."""
        with self._lock:
            self._pods[pod.workload.name].remove(pod)
        pod.discard()

    def _add(self, name: str) -> Pod:
        return self._start(self.workloads[name])

    def _start(self, workload: Workload) -> Pod:
        assert self._place is not None
        pod = Pod(workload, self._place)
        with self._lock:
            self._pods[workload.name].append(pod)
        return pod

    def _retire(self, pod: Pod) -> None:
        pod.stop()
        with self._lock:
            self._pods[pod.workload.name].remove(pod)

    def _clean_up(self) -> None:
        for pod in self.all_pods():
            with contextlib.suppress(PodmanError):
                pod.discard()
        if self._place is not None:
            # Those that a failed start has left too.
            left = podman("ps", "--all", "--quiet", f"--filter=label=triptych={self._place.name}", check=False).split()
            remove(left)
            remove(sorted(self._place.volumes), "volume")
            remove([self._place.name], "network")
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
