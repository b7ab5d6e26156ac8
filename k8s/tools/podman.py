"""The few commands of podman that `make cluster-check` needs. Each has a deadline; none goes through a shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0


class PodmanError(Exception):
    """A command failed, or took too long. One line."""


def podman(*args: str, timeout_s: float = _TIMEOUT_S, check: bool = True, merged: bool = False) -> str:
    """What `podman ARGS` printed on standard output; `merged`, on standard error too.

    Raises PodmanError unless it ended well, or `check` is false.
    """
    program = shutil.which("podman")
    if program is None:
        raise PodmanError("podman is not installed; on Debian: apt-get install podman runc netavark aardvark-dns")
    try:
        done = subprocess.run(  # noqa: S603 - a list of our own making, no shell
            [program, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=tempfile.gettempdir(),  # conmon leaves a file `oom` there when a container had too little memory
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        raise PodmanError(f"podman {args[0]} took longer than {timeout_s:g} s") from None
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise PodmanError(f"podman {args[0]}: {said[-1]}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Ours. Without systemd, podman needs other settings than its own: containers.conf beside this file."""
    if "CONTAINERS_CONF" in os.environ or Path("/run/systemd/system").is_dir():
        return dict(os.environ)
    return {**os.environ, "CONTAINERS_CONF": str(Path(__file__).with_name("containers.conf"))}


def inspect(name: str) -> dict[str, Any]:
    """Of a container. Raises PodmanError where there is none."""
    found: dict[str, Any] = json.loads(podman("container", "inspect", name))[0]
    return found


def is_running(name: str) -> bool:
    """False too where there is no such container any more."""
    return podman("container", "inspect", "--format={{.State.Running}}", name, check=False).strip() == "true"


def image_exists(name: str) -> bool:
    return podman("image", "inspect", "--format={{.Id}}", name, check=False).strip() != ""


def remove(names: Sequence[str], kind: str = "container") -> None:
    """Containers, volumes or networks, whatever state they are in; those that are gone already too."""
    for name in names:
        force = ["--force", "--time=0"] if kind == "container" else ["--force"]
        podman(kind, "rm", *force, name, check=False)
