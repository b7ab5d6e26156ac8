"""What an operator gets wrong, in containers: the pod says so in one line, and the rest serves, no request fails.

The topology is `production`, whose Redis asks for a password. It begins without Redis; then pods come that have another
Redis password, no model, another model, and too little memory.
"""

from __future__ import annotations

import copy
import re
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from demo.questions import held_out
from k8s.tools.check import Check, CheckError
from k8s.tools.manifests import K8S, ManifestError, Object, Workload, overlays
from k8s.tools.picture_load import PictureLoad
from k8s.tools.podman import podman
from k8s.tools.podman_cluster import PodmanCluster
from k8s.tools.pods import Pod

_GRPC_PORT = 50060
_SECRETS = {("redis", "password"): "a password with a space, and $ and #"}
_MODEL = K8S.parent / "demo" / "model"
_CLAIM = "other-model"
_WAIT_S = 90.0
#: Of which so little is left beside programs and weights that one longest request does not fit.
_LITTLE_MEMORY = "310Mi"
#: As the engine finds out, or, where the kernel was faster, as the kernel did.
_NO_MEMORY = r"error: (.*(memory is left|no memory)|.*ended with code -9)"
_SEED = 6
_NEW_PICTURES = 400  # more than are asked about until Redis is used


def check_bad_input() -> None:
    """Raises CheckError, PodmanError or ManifestError. Everything is gone afterwards."""
    print("bad input, in production: starting without its Secret and without Redis", flush=True)
    _without_secret()
    with PodmanCluster(overlays()["production"], later=("redis",), secrets=_SECRETS) as cluster:
        load = PictureLoad(lambda: cluster.endpoints("router"), _GRPC_PORT, seed=_SEED)
        check = Check(cluster, load)
        print(f"  {check.rehearse()} questions answered rightly without Redis", flush=True)
        _say(cluster.pods("encoder")[0], r"Redis cannot be reached")
        with load:
            check.step("Redis comes", lambda: _redis_comes(cluster, load))
            check.step("a model that is not there", lambda: _no_model(cluster))
            check.step("too little memory", lambda: _little_memory(cluster))
            check.step("another password", lambda: _another_password(cluster))
            check.step("another model", lambda: _another_model(cluster))


def _without_secret() -> None:
    """A kubelet would not start the container and name the Secret; so does what stands for one."""
    try:
        with PodmanCluster(overlays()["production"]):
            raise CheckError("production started without the Secret that it needs")
    except ManifestError as error:  # of the first container that refers to it
        print(f"    {error}", flush=True)


def _redis_comes(cluster: PodmanCluster, load: PictureLoad) -> None:
    """It is used for pictures that are new: the others are in the stages' own memory."""
    cluster.scale({"redis": 1})
    redis = cluster.pods("redis")[0]
    new = iter(held_out(_SEED + 1, _NEW_PICTURES))

    def is_used() -> bool:
        load.ask(next(new))
        return int(podman("exec", redis.name, "redis-cli", "dbsize")) > 0

    _until("embeddings are in Redis", is_used)


def _no_model(cluster: PodmanCluster) -> None:
    strange = cluster.add_strange(_with_env(cluster.workloads["encoder"], "TRIPTYCH_MODEL", "/models/none"))
    _ends(cluster, strange, r"error: --model=./models/none.: not a folder", {2})


def _little_memory(cluster: PodmanCluster) -> None:
    workload = _copy(cluster.workloads["prefill"])
    workload.container["resources"]["limits"]["memory"] = _LITTLE_MEMORY
    _ends(cluster, cluster.add_strange(workload), _NO_MEMORY, {1, 2})


def _another_password(cluster: PodmanCluster) -> None:
    """Redis refuses it; the encoder serves, and hands its embeddings out itself."""
    strange = cluster.add_strange(_with_env(cluster.workloads["encoder"], "REDIS_PASSWORD", "another"))
    strange.wait_ready(time.monotonic() + _WAIT_S)
    _until("it says so", lambda: "WRONGPASS" in strange.log(100) or "password" in strange.log(100))
    _say(strange, r"WRONGPASS|password")
    cluster.discard(strange)


def _another_model(cluster: PodmanCluster) -> None:
    """It would serve, and the routers leave it out, with both values in their logs."""
    workload = _with_env(cluster.workloads["prefill"], "TRIPTYCH_MODEL", "/models/model")
    workload.pod["volumes"].append({"name": "model", "persistentVolumeClaim": {"claimName": _CLAIM}})
    workload.container["volumeMounts"].append({"name": "model", "mountPath": "/models/model"})
    with tempfile.TemporaryDirectory(prefix="triptych-check-") as folder:
        cluster.fill_claim(_CLAIM, _other_model(Path(folder)))
    strange = cluster.add_strange(workload)
    strange.wait_ready(time.monotonic() + _WAIT_S)
    routers = cluster.pods("router")
    for router in routers:
        _until("the router leaves it out", lambda router=router: "is left out" in router.log(200))  # type: ignore[misc]
    _say(routers[0], r"is left out")
    cluster.discard(strange)


def _other_model(folder: Path) -> Path:
    """The demo model with one weight changed in its last bit, as a tar file."""
    archive = folder / "model.tar"
    weights = folder / "model.safetensors"
    content = bytearray((_MODEL / weights.name).read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    with tarfile.open(archive, "w") as tar:
        for path in sorted(_MODEL.iterdir()):
            tar.add(weights if path.name == weights.name else path, arcname=path.name)
    return archive


def _copy(workload: Workload) -> Workload:
    return copy.deepcopy(workload)


def _with_env(workload: Workload, name: str, value: str) -> Workload:
    made = _copy(workload)
    env: list[Object] = made.container["env"]
    made.container["env"] = [each for each in env if each["name"] != name] + [{"name": name, "value": value}]
    return made


def _ends(cluster: PodmanCluster, pod: Pod, said: str, wanted: set[int]) -> None:
    """Raises CheckError unless it ends with a code of `wanted`, never ready, and says why in one line like `said`."""
    _until("it ends", lambda: bool(pod.exit_codes))
    _until("it says why", lambda: "error: " in pod.log(200))  # podman may have the code before the last lines
    was_ready, text, codes = pod.ready, pod.log(200), list(pod.exit_codes)
    cluster.discard(pod)
    lines = {line for line in text.splitlines() if line.startswith("error: ")}
    if was_ready or not set(codes) <= wanted or len(lines) != 1 or not re.match(said, next(iter(lines))):
        raise CheckError(f"{pod.name} ended with {codes}, expected one of {wanted}; it said:\n{text[-3000:]}")
    print(f"    exit code {codes[0]}: {next(iter(lines))}", flush=True)


def _say(pod: Pod, wanted: str) -> None:
    """Print the first line of its log that matches. Raises CheckError where there is none."""
    for line in pod.log(400).splitlines():
        if re.search(wanted, line):
            print(f"    {pod.workload.name}: {line[:400]}", flush=True)
            return
    raise CheckError(f"{pod.name} does not say {wanted!r}; it said:\n{pod.log(30)}")


def _until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise CheckError(f"not within {_WAIT_S:g} s: {what}")
        time.sleep(0.3)  # neither podman nor a log tells when
