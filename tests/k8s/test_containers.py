"""How `make cluster-check` reads a pod: as one container with the pod's own command, limits, files and restrictions."""

from __future__ import annotations

import copy
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from k8s.tools.manifests import K8S, ManifestError, Object, Workload, cores, environment, size_bytes, workloads
from k8s.tools.pods import Place, accepts, run_args


@pytest.fixture
def place(rendered: dict[str, list[Object]], tmp_path: Path) -> Place:
    return Place("a-network", "10.9.8.0", tmp_path, rendered["default"])


def named(objects: list[Object], name: str) -> Workload:
    return next(workload for workload in workloads(objects) if workload.name == name)


def test_a_stage_runs_as_its_pod_says(place: Place) -> None:
    args = run_args(named(place.objects, "prefill"), place, "prefill-1", place.address())
    image = args.index("triptych-engine:0.1.0")
    assert args[image + 1 :][:3] == ["-m", "services.prefill", "serve"]
    assert "--kv-role=kv_producer" in args[image:]
    for wanted in (
        "--entrypoint=python",
        "--network=a-network:ip=10.9.8.11,mac=02:42:0a:09:08:0b,alias=prefill",
        "--user=10001:10001",
        "--read-only",
        "--cap-drop=ALL",
        f"--memory={2 << 30}",
        "--cpus=2.0",
        "--env=TRIPTYCH_ADVERTISE_HOST=10.9.8.11",
        "--env=TRIPTYCH_WHERE=prefill-1",
        "--env=OMP_NUM_THREADS=2",
        "--env=TRIPTYCH_EC_CONNECTOR=ECRedisConnector",
        f"--tmpfs=/dev/shm:rw,mode=1777,size={256 << 20}",
    ):
        assert wanted in args[:image], wanted


def test_files_of_a_config_map_are_mounted(place: Place) -> None:
    args = run_args(named(place.objects, "redis"), place, "redis-1", place.address())
    folder = next(arg for arg in args if arg.endswith(":/etc/triptych:ro")).split("=")[1].split(":")[0]
    assert "maxmemory-policy allkeys-lru" in (Path(folder) / "redis.conf").read_text()


def test_a_claim_is_one_volume_for_all(rendered: dict[str, list[Object]], tmp_path: Path) -> None:
    place = Place("a-network", "10.9.8.0", tmp_path, rendered["shared-storage"])
    for name in ("encoder", "prefill", "decode"):
        args = run_args(named(place.objects, name), place, name, place.address())
        assert "--volume=a-network-embeddings:/var/lib/triptych:U" in args
    assert place.volumes == {"a-network-embeddings"}


def test_what_is_not_understood_is_an_error(place: Place) -> None:
    workload = copy.deepcopy(named(place.objects, "encoder"))
    workload.pod["volumes"][0] = {"name": "tmp", "hostPath": {"path": "/"}}
    with pytest.raises(ManifestError, match="encoder: volume tmp"):
        run_args(workload, place, "encoder-1", place.address())


def test_a_probe_that_is_not_understood_is_an_error(place: Place) -> None:
    workload = copy.deepcopy(named(place.objects, "encoder"))
    workload.container["readinessProbe"] = {"httpGet": {"port": 9101}}
    with pytest.raises(ManifestError, match="encoder: readinessProbe"):
        run_args(workload, place, "encoder-1", place.address())


def test_a_tcp_probe_passes_where_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert accepts("127.0.0.1", port, 5)
    assert not accepts("127.0.0.1", port, 5)


def test_an_absent_secret_is_named(rendered: dict[str, list[Object]]) -> None:
    encoder = named(rendered["production"], "encoder")
    fields = {"status.podIP": "10.0.0.1", "metadata.name": "encoder-1"}
    with pytest.raises(ManifestError, match="REDIS_PASSWORD: secretKeyRef"):
        environment(encoder.container, rendered["production"], fields, {})


def test_quantities() -> None:
    assert [cores("250m"), cores("1"), cores("1500m"), cores("4")] == [1, 1, 2, 4]
    assert [size_bytes("64Mi"), size_bytes("2Gi"), size_bytes("100")] == [64 << 20, 2 << 30, 100]
    with pytest.raises(ManifestError, match="1G"):
        size_bytes("1G")


def test_a_machine_without_podman_is_told_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "k8s.tools.possible"],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(K8S.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: containers cannot run here: ")
    assert re.search("is not installed|not root", line), line
