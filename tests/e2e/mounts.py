"""A small file system of its own at a folder: the only way to a store that is really full or really read-only, since
root is stopped by no mode."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType


@functools.cache
def can_mount() -> bool:
    """Whether this process may mount: root outside of a container, or in one that allows it."""
    if shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Mounted(Path(folder), size_bytes=1 << 16):
                return True
        except subprocess.CalledProcessError:
            return False


class Mounted:
    """A tmpfs of `size_bytes` at `folder` for as long as the context lasts."""

    def __init__(self, folder: Path, *, size_bytes: int) -> None:
        self.folder = folder
        self._options = f"size={size_bytes}"

    def __enter__(self) -> Mounted:
        self.mount()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.folder.is_mount():
            self.unmount()

    def mount(self) -> None:
        _run("mount", "-t", "tmpfs", "-o", self._options, "tmpfs", str(self.folder))

    def unmount(self) -> None:
        """At once, whoever has a file open there."""
        _run("umount", "--lazy", str(self.folder))

    def set_read_only(self, read_only: bool) -> None:
        _run("mount", "-o", f"remount,{'ro' if read_only else 'rw'},{self._options}", str(self.folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
