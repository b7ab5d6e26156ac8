"""One pod as a container: what `podman run` is told, and the kubelet's part, which is probes, restarts and the end.

A pod's thread starts the container again when it has ended, asks its probes and keeps `ready` up to date, until `stop`.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k8s.tools.manifests import (
    ManifestError,
    Object,
    Workload,
    argv,
    config_files,
    environment,
    services_of,
    size_bytes,
)
from k8s.tools.podman import PodmanError, is_running, podman

#: A pause between a container's end and its next start; a cluster would take longer each time.
_RESTART_PAUSE_S = 0.5
_DEFAULT_TIMEOUT_S = 1.0
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_PROBE_KINDS = frozenset(("grpc", "exec", "tcpSocket"))


class Place:
    """What the pods of one run share: a network, names, files, secrets."""

    def __init__(self, name: str, subnet: str, folder: Path, objects: list[Object]) -> None:
        self.name = name  # of the network, and what every name of ours begins with
        self.folder = folder  # for files of ConfigMaps
        self.objects = objects
        self.secrets: dict[tuple[str, str], str] = {}
        self.volumes: set[str] = set()
        self._subnet = subnet.rpartition(".")[0]
        self._next = 10

    def volume(self, claim: str) -> str:
        """podman's name for it; removed in the end."""
        name = f"{self.name}-{claim}"
        self.volumes.add(name)
        return name

    def address(self) -> str:
        """An address that no pod of this run has had. Raises ManifestError once there are none left."""
        if self._next >= 250:
            raise ManifestError("no addresses are left in the network")
        self._next += 1
        return f"{self._subnet}.{self._next}"


def _mac(address: str) -> str:
    """The same one each time: a pod keeps its interface when its container is started again, and others' tables of
    neighbours stay right."""
    return ":".join(f"{part:02x}" for part in (0x02, 0x42, *map(int, address.split("."))))


def run_args(workload: Workload, place: Place, name: str, address: str) -> list[str]:
    """Arguments of `podman run` for one pod of `workload`. Raises ManifestError for what cannot be translated."""
    container, pod = workload.container, workload.pod
    for probe in _PROBES:
        if not _PROBE_KINDS & container.get(probe, {"exec": None}).keys():
            raise ManifestError(f"{workload.name}: {probe} is of a kind that is not supported here")
    fields = {"status.podIP": address, "metadata.name": name}
    env = environment(container, place.objects, fields, place.secrets)
    aliases = [f"alias={service}" for service in services_of(place.objects, workload.labels)]
    user = pod["securityContext"]
    limits = container["resources"]["limits"]
    args = [
        *("--detach", f"--name={name}", f"--hostname={name}", f"--label=triptych={place.name}"),
        f"--network={place.name}:{','.join([f'ip={address}', f'mac={_mac(address)}', *aliases])}",
        f"--user={user['runAsUser']}:{user['runAsGroup']}",
        *("--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *(f"--memory={size_bytes(limits['memory'])}", f"--cpus={_cpus(limits['cpu'])}", "--pull=never"),
        *(f"--env={key}={value}" for key, value in env.items()),
        *_mounts(workload, place, name),
    ]
    command = argv(container, env)
    return [*args, f"--entrypoint={command[0]}", container["image"], *command[1:]]


def _cpus(quantity: str) -> float:
    text = str(quantity)
    return int(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _mounts(workload: Workload, place: Place, name: str) -> list[str]:
    volumes = {volume["name"]: volume for volume in workload.pod["volumes"]}
    made = []
    for mount in workload.container["volumeMounts"]:
        volume, path = volumes[mount["name"]], mount["mountPath"]
        if "emptyDir" in volume:
            # In memory, whatever its medium, so that its size limit holds.
            made.append(f"--tmpfs={path}:rw,mode=1777,size={size_bytes(volume['emptyDir']['sizeLimit'])}")
        elif "configMap" in volume:
            folder = place.folder / name / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in config_files(place.objects, volume).items():
                (folder / file).write_text(text)
            made.append(f"--volume={folder}:{path}:ro")
        elif "persistentVolumeClaim" in volume:
            claim = place.volume(volume["persistentVolumeClaim"]["claimName"])
            made.append(f"--volume={claim}:{path}:U")  # U: owned by the container's user, which is what fsGroup does
        else:
            raise ManifestError(f"{workload.name}: volume {mount['name']} is of a kind that is not supported here")
    return made


class Pod:
    """One container under a kubelet's care, from construction on. `stop` is to be called in the end."""

    def __init__(self, workload: Workload, place: Place) -> None:
        """Starts it. Raises PodmanError or ManifestError."""
        self.workload = workload
        self.name = f"{place.name}-{workload.name}-{random.randbytes(3).hex()}"
        self.address = place.address()
        self.ready = False
        self.exit_codes: list[int] = []  # of the container's lives so far
        self._starts_due = 0  # it is ready only after so many ends
        self.terminating = False
        self._wake = threading.Event()
        self._channel = (
            grpc.insecure_channel(f"{self.address}:{_grpc_port(workload)}") if _grpc_port(workload) else None
        )
        podman("run", *run_args(workload, place, self.name, self.address))
        self._thread = threading.Thread(target=self._care, name=self.name, daemon=True)
        self._thread.start()

    def wait_ready(self, deadline: float) -> None:
        """Raises PodmanError, with the last lines of its log, where it is not ready by then (monotonic clock).

        After `kill`, ready again.
        """
        while not self.ready or len(self.exit_codes) < self._starts_due:
            if time.monotonic() > deadline:
                raise PodmanError(f"{self.name} was not ready in time; it said:\n{self.log(15)}")
            time.sleep(0.05)

    def stay_ready(self, seconds: float) -> None:
        """Returns after so long. Raises PodmanError, with the last lines of its log, once it is not ready any more."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.ready:
                raise PodmanError(f"{self.name} did not stay ready; it said:\n{self.log(15)}")
            time.sleep(0.05)

    def log(self, lines: int) -> str:
        """The last ones of both streams, of all lives of the container."""
        return podman("logs", f"--tail={lines}", self.name, check=False, merged=True)

    def kill(self) -> None:
        """SIGKILL, as the kernel's memory killer would. It is started again."""
        due = len(self.exit_codes) + 1
        with contextlib.suppress(PodmanError):  # it has ended already, and is about to be started again
            podman("kill", "--signal=KILL", self.name)
            self._starts_due = due
            self.ready = False

    def stop(self) -> None:
        """Out of the Services, preStop, SIGTERM; then the container goes.

        Raises PodmanError where it did not end by itself, with exit code 0, within the grace period.
        """
        self._end_care()
        hook = self.workload.container.get("lifecycle", {}).get("preStop", {}).get("exec")
        grace_s = float(self.workload.pod.get("terminationGracePeriodSeconds", 30))
        deadline = time.monotonic() + grace_s
        if hook is not None:
            podman("exec", self.name, *hook["command"], timeout_s=grace_s, check=False)
        podman("kill", "--signal=TERM", self.name, check=False)
        left_s = max(1.0, deadline - time.monotonic())
        code = podman("wait", "--condition=stopped", self.name, timeout_s=left_s).strip()
        if code != "0":
            raise PodmanError(f"{self.name} ended with exit code {code} after SIGTERM; it said:\n{self.log(15)}")
        podman("rm", "--force", "--time=0", self.name, check=False)

    def discard(self) -> None:
        """Gone at once."""
        self._end_care()
        podman("rm", "--force", "--time=0", self.name, check=False)

    def _end_care(self) -> None:
        self.terminating = True
        self.ready = False
        self._wake.set()
        self._thread.join(timeout=30)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # -- the kubelet's part, on the pod's own thread --

    def _care(self) -> None:
        while not self.terminating:
            self._live_once()
            if self._wake.is_set():
                return
            code = podman("container", "inspect", "--format={{.State.ExitCode}}", self.name, check=False).strip()
            self.exit_codes.append(int(code or -1))
            if self._wake.wait(_RESTART_PAUSE_S):
                return
            podman("start", self.name, check=False)

    def _live_once(self) -> None:
        """From a start of the container to its end, or to ours."""
        probes = {kind: self.workload.container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
        failures = dict.fromkeys(probes, 0)
        due = dict.fromkeys(probes, 0.0)
        started = False
        while not self.terminating:
            for kind, probe in probes.items():
                now = time.monotonic()
                if probe is None or now < due[kind] or (kind == "startup") == started:
                    continue
                due[kind] = now + float(probe.get("periodSeconds", 10))
                failures[kind] = 0 if self._passes(probe) else failures[kind] + 1
                exhausted = failures[kind] >= int(probe.get("failureThreshold", 3))
                if kind == "startup":
                    started = failures[kind] == 0
                elif kind == "readiness" and (failures[kind] == 0 or exhausted):
                    self.ready = failures[kind] == 0 and not self.terminating
                if exhausted and kind != "readiness":
                    podman("kill", "--signal=KILL", self.name, check=False)
            if not is_running(self.name):
                self.ready = False
                return
            self._wake.wait(0.25)

    def _passes(self, probe: dict[str, Any]) -> bool:
        timeout_s = float(probe.get("timeoutSeconds", _DEFAULT_TIMEOUT_S))
        if "grpc" in probe:
            return self._answers(probe["grpc"].get("service", ""), timeout_s)
        if "exec" in probe:
            try:
                # podman itself takes a while to get there; a cluster's clock starts later.
                podman("exec", self.name, *probe["exec"]["command"], timeout_s=timeout_s + 5)
            except PodmanError:
                return False
            return True
        return accepts(self.address, int(probe["tcpSocket"]["port"]), timeout_s)

    def _answers(self, service: str, timeout_s: float) -> bool:
        channel = self._channel
        if channel is None:
            return False
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed meanwhile
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def accepts(host: str, port: int, timeout_s: float) -> bool:
    """Whether somebody takes a TCP connection there, in time."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def _grpc_port(workload: Workload) -> int:
    """0 for one without gRPC."""
    return next((int(port["containerPort"]) for port in workload.container["ports"] if port["name"] == "grpc"), 0)
