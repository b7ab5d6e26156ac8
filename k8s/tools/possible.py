"""`make cluster-check-possible`: whether containers can run on this machine as `make cluster-check` needs them.

    python -m k8s.tools.possible

Runs one container of a few hundred kilobytes, made from the static program `catatonit`: storage, namespaces, a bridge
network with a name server, memory and CPU limits. Says so and exits with 0, or says in one line what is missing and
exits with 1. Takes some two seconds and leaves nothing behind.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import click

from k8s.tools.podman import PodmanError, podman, remove

_HELPERS = (Path("/usr/lib/podman"), Path("/usr/libexec/podman"), Path("/usr/local/libexec/podman"))
_PROGRAM = "catatonit"


def why_not() -> str:
    """What is missing, in one line; empty where nothing is."""
    if os.geteuid() != 0:
        return "not root, whom podman needs for a bridge network with addresses that this machine reaches"
    for helper in ("netavark", "aardvark-dns"):
        if not any((folder / helper).is_file() for folder in _HELPERS) and shutil.which(helper) is None:
            return f"{helper} is not installed; on Debian: apt-get install {helper}"
    program = shutil.which(_PROGRAM)
    if program is None:
        return f"{_PROGRAM} is not installed; on Debian: apt-get install {_PROGRAM}"
    name = f"triptych-possible-{random.randbytes(3).hex()}"
    try:
        _run(name, Path(program))
    except PodmanError as error:
        return str(error)
    finally:
        _clean_up(name)
    return ""


def _run(name: str, program: Path) -> None:
    """Raises PodmanError where one container with all that pods are given does not run."""
    with tempfile.TemporaryDirectory(prefix="triptych-possible-") as folder:
        archive = Path(folder) / "root.tar"
        with tarfile.open(archive, "w") as root:
            entry = tarfile.TarInfo(_PROGRAM)
            entry.mode = 0o755
            content = program.read_bytes()
            entry.size = len(content)
            root.addfile(entry, io.BytesIO(content))
        podman("import", "--quiet", str(archive), name)
    podman("network", "create", name)
    restrictions = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=10001:10001")
    limits = ("--memory=64m", "--cpus=1", "--tmpfs=/tmp:rw,mode=1777,size=1048576")
    podman("run", f"--name={name}", f"--network={name}", *restrictions, *limits, name, f"/{_PROGRAM}", "--version")


def _clean_up(name: str) -> None:
    try:
        remove([name])
        remove([name], "network")
        podman("image", "rm", "--force", name, check=False)
    except PodmanError:
        return  # podman itself is not there, or hangs; `why_not` has said so


@click.command()
def main() -> None:
    """Say whether containers can run here."""
    reason = why_not()
    if reason:
        print(f"error: containers cannot run here: {reason}", file=sys.stderr)
        sys.exit(1)
    print("containers can run here")


if __name__ == "__main__":
    main()
