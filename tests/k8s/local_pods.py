"""Rendered containers as processes on loopback: their own command, arguments and environment, with other addresses.

Ports become free ones, names of Services and addresses of pods become 127.0.0.1, folders that are mounted become
folders of the test. Nothing else is changed.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from cli.process import Child
from core.ports import free_ports
from k8s.tools.manifests import Object, Workload, argv, config_files, environment, workloads

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 100.0
#: As a careless `--from-file` makes it: with the line's end, which is no part of it.
SECRETS = {("redis", "password"): 'a "password" with \\ and #\n'}
_KEPT = ("/tmp", "/dev/shm")  # are there on every machine


class LocalPods:
    """One process for each workload, whatever its replicas. `ports` has the real ones by the rendered ones."""

    def __init__(self, objects: list[Object], folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self._workloads = workloads(objects)
        declared = [port["containerPort"] for each in self._workloads for port in each.container["ports"]]
        self.ports = dict(zip(declared, free_ports(len(declared)), strict=True))
        self.children: dict[str, Child] = {}
        self._translated = re.compile("|".join(self._patterns()))

    def _patterns(self) -> Iterator[str]:
        names = "|".join(made["metadata"]["name"] for made in self._objects if made["kind"] == "Service")
        yield rf"(?P<name>\b(?:{names}))(?=:(?:{'|'.join(map(str, self.ports))})\b)"
        yield rf"(?P<port>(?<![\w.]){'(?![0-9])|(?<![0-9.])'.join(map(str, self.ports))}(?![0-9]))"
        yield r"(?P<any>0\.0\.0\.0|\* -::\*)"

    def local(self, text: str, workload: Workload) -> str:
        """`text` with loopback's addresses and the test's folders in it."""

        def replace(found: re.Match[str]) -> str:
            return str(self.ports[int(found[0])]) if found.lastgroup == "port" else "127.0.0.1"

        text = self._translated.sub(replace, text)
        for mount in workload.container["volumeMounts"]:
            path = mount["mountPath"]
            if path not in _KEPT:
                text = re.sub(rf"{re.escape(path)}(?=[/\"\s]|$)", str(self._mounted(workload, path)), text)
        return text

    def _mounted(self, workload: Workload, path: str) -> Path:
        """A claim is one folder for all, anything else one for each workload."""
        volumes = {volume["name"]: volume for volume in workload.pod["volumes"]}
        name = next(mount["name"] for mount in workload.container["volumeMounts"] if mount["mountPath"] == path)
        owner = "shared" if "persistentVolumeClaim" in volumes[name] else workload.name
        folder = self._folder / owner / path.strip("/").replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" in volumes[name]:
            for file, text in config_files(self._objects, volumes[name]).items():
                text = re.sub(r"^dir .*$", f"dir {self._folder}", text, flags=re.MULTILINE)
                (folder / file).write_text(self.local_ports(text))
        return folder

    def local_ports(self, text: str) -> str:
        """A configuration file has addresses, and no folders of ours."""
        return text.replace("* -::*", "127.0.0.1").replace("6379", str(self.ports.get(6379, 6379)))

    def start(self) -> None:
        """All of them; wait until those that say so are ready. Raises AssertionError with a process's last words."""
        for workload in self._workloads:
            self.start_one(workload.name)
        deadline = time.monotonic() + _START_S
        for name, child in self.children.items():
            if name != "redis":
                assert child.wait_ready(deadline), f"{name}: {child.tail()}"

    def start_one(self, name: str, changed: Mapping[str, str | None] | None = None) -> Child:
        """One workload's process, with some variables set otherwise, or (None) not at all. Not waited for."""
        workload = next(each for each in self._workloads if each.name == name)
        fields = {"status.podIP": "127.0.0.1", "metadata.name": f"{name}-0"}
        env = environment(workload.container, self._objects, fields, SECRETS)
        env = {key: self.local(value, workload) for key, value in env.items()}
        command = [self.local(part, workload) for part in argv(workload.container, env)]
        if command[0] == "python":
            command = [sys.executable, "-P", *command[1:]]
        own = {key: value for key, value in os.environ.items() if not key.startswith("TRIPTYCH_")}
        whole: dict[str, str | None] = {**own, **env, "PYTHONPATH": str(_ROOT), **(changed or {})}
        child = Child(
            name,
            command,
            env={key: value for key, value in whole.items() if value is not None},
            log_path=self._folder / f"{name}.log",
        )
        self.children[name] = child
        child.start()
        return child

    def stop(self) -> dict[str, int]:
        """SIGTERM to all; their exit codes by name."""
        for child in self.children.values():
            child.terminate()
        for child in self.children.values():
            child.wait_ended(time.monotonic() + 30)
        return {name: child.process.returncode for name, child in self.children.items()}
