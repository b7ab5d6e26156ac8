"""A small file system of its own, where this process may mount one: the only way to a folder that is really full."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from connectors.conformance.harness import NotTriedError

_ROOMY_BYTES = 4 << 30  # an upper bound; memory is taken as files are written
_COMMAND_S = 10.0


class Volume:
    """A tmpfs at `folder`. Where it cannot be mounted `folder` is an ordinary folder and `fill` is not tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_mounted = False

    def open(self) -> None:
        self.folder.mkdir()
        self._is_mounted = _mount("-t", "tmpfs", "-o", f"size={_ROOMY_BYTES}", "tmpfs", str(self.folder))

    def fill(self) -> None:
        """Leave a few pages. Raises NotTriedError."""
        if not self._is_mounted:
            raise NotTriedError("no right to mount a small file system")
        self._resize(shutil.disk_usage(self.folder).used + (1 << 15))

    def free(self) -> None:
        if self._is_mounted:
            self._resize(_ROOMY_BYTES)

    def close(self) -> None:
        """At once, whoever has a file open there."""
        if self._is_mounted:
            self._is_mounted = False
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True, timeout=_COMMAND_S)  # noqa: S603, S607

    def _resize(self, size_bytes: int) -> None:
        if not _mount("-o", f"remount,size={size_bytes}", str(self.folder)):
            raise NotTriedError("the small file system cannot be made smaller")


def _mount(*arguments: str) -> bool:
    command = shutil.which("mount")
    if command is None:
        return False
    done = subprocess.run([command, *arguments], check=False, capture_output=True, timeout=_COMMAND_S)  # noqa: S603 - no shell
    return done.returncode == 0
