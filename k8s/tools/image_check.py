"""What is promised of the two images: no torch in the router's, which answers at once; no root, nothing written."""

from __future__ import annotations

import random
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.health import LIVENESS
from k8s.tools.manifests import Workload
from k8s.tools.podman import PodmanError, inspect, podman

_PORT = 50060
#: Until its gRPC answers.
_ROUTER_START_S = 2.0
#: The best of so many counts: what else the machine does is not the image's.
_STARTS = 3


class ImageError(Exception):
    """A promise that an image does not keep. One line."""


def check_images(router: Workload, engine: Workload) -> None:
    """Raises ImageError or PodmanError. Leaves no container behind."""
    for workload in (router, engine):
        image = workload.container["image"]
        user = podman("image", "inspect", "--format={{.User}}", image).strip()
        if user.partition(":")[0] in ("", "0", "root"):
            raise ImageError(f"{image} runs as {user or 'root'} unless told otherwise")
        size = int(podman("image", "inspect", "--format={{.Size}}", image))
        print(f"  {image}: {size / 1e6:.0f} MB, user {user}", flush=True)
    if _has_torch(router.container["image"]):
        raise ImageError(f"{router.container['image']} has torch")
    if not _has_torch(engine.container["image"]):
        raise ImageError(f"{engine.container['image']} has no torch")
    took_s = min(_router_start(router.container["image"]) for _ in range(_STARTS))
    print(f"  the router's gRPC answers {took_s:.1f} s after the start of its container", flush=True)
    if took_s > _ROUTER_START_S:
        raise ImageError(f"the router took {took_s:.1f} s to answer, more than {_ROUTER_START_S:g} s")


def _has_torch(image: str) -> bool:
    program = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    return podman("run", "--rm", "--network=none", "--read-only", image, "python", "-c", program).strip() == "True"


def _router_start(image: str) -> float:
    """Seconds from when podman was asked to start it: podman's own part, some tenths of a second, included."""
    name = f"triptych-router-start-{random.randbytes(3).hex()}"
    stages = [f"--{stage}=127.0.0.1:1" for stage in ("encoder", "prefill", "decode")]
    command = ["python", "-m", "router", "serve", "--host=0.0.0.0", f"--port={_PORT}", *stages]
    began = time.monotonic()
    podman("run", "--detach", f"--name={name}", "--read-only", "--cap-drop=ALL", image, *command)
    try:
        networks = inspect(name)["NetworkSettings"]["Networks"]
        host = next(network["IPAddress"] for network in networks.values())
        with grpc.insecure_channel(f"{host}:{_PORT}", options=(("grpc.max_reconnect_backoff_ms", 50),)) as channel:
            request = health_pb2.HealthCheckRequest(service=LIVENESS)
            health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True)
        return time.monotonic() - began
    except grpc.RpcError as error:
        raise ImageError(f"the router's image does not serve: {error.code().name}") from error
    finally:
        try:
            podman("rm", "--force", "--time=0", name)
        except PodmanError as error:
            print(f"  {name} is left behind: {error}")
