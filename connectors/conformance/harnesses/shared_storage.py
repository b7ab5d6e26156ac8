"""Faults for `ECSharedStorageConnector`: a folder that is renamed, filled, and whose files are spoilt."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from connectors.conformance.harness import Damage, Harness, StoredItem
from connectors.conformance.harnesses.volume import Volume

_ITEM = re.compile(r"[0-9a-f]{64}\.safetensors")
_VERSION = re.compile(rb'("format_version":\s*")\d')
_CHECKSUM = re.compile(rb'("xxh3_128":\s*")[0-9a-f]{32}')


class SharedStorageHarness(Harness):
    """A folder on a small file system of its own. Hanging storage is a named pipe in a file's place: whoever opens it
    waits, as with a file server that does not answer."""

    def __init__(self, folder: Path, extra: Mapping[str, Any]) -> None:
        super().__init__(folder, extra)
        self._volume = Volume(folder / "volume")
        self._root = folder / "volume" / "items"
        self._away = folder / "volume" / "away"
        self._num_fresh = 0
        self._pipes: list[Path] = []

    def open(self) -> None:
        self._volume.open()
        self._root.mkdir()

    def extra(self) -> Mapping[str, Any]:
        return {**self.operators_extra, "shared_storage_path": str(self._root)}

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return {"timeout_s": seconds}

    def capacity(self, num_bytes: int) -> Mapping[str, Any]:
        return {**self._fresh(), "capacity_bytes": num_bytes}

    def ttl(self, seconds: float) -> Mapping[str, Any]:
        return {**self._fresh(), "ttl_s": seconds}

    def stop(self) -> None:
        self._root.rename(self._away)

    def start(self) -> None:
        if self._away.exists():
            shutil.rmtree(self._root, ignore_errors=True)  # an impostor that somebody made meanwhile
            self._away.rename(self._root)

    def fill(self) -> None:
        self._volume.fill()

    def free(self) -> None:
        self._volume.free()

    def slow(self, items: Sequence[StoredItem]) -> None:
        for item in items:
            path = self._path(item)
            path.parent.mkdir(parents=True, exist_ok=True)
            pipe = path.with_suffix(".pipe")
            os.mkfifo(pipe)
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_suffix(".aside"))
            pipe.rename(path)
            self._pipes.append(path)

    def unslow(self) -> None:
        while self._pipes:
            path = self._pipes.pop()
            if path.is_fifo():
                pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # whoever waits in `open` goes on …
                path.unlink()
                time.sleep(0.01)
                os.close(pipe)  # … and finds an empty file
            aside = path.with_suffix(".aside")
            if aside.exists() and not path.exists():
                aside.rename(path)
            aside.unlink(missing_ok=True)

    def damage(self, item: StoredItem, how: Damage, other: StoredItem | None) -> None:
        raw = self._path(item).read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        if how is Damage.FLIPPED_BIT:
            spoilt = raw[:-1] + bytes([raw[-1] ^ 1])
        elif how is Damage.GARBAGE:
            spoilt = os.urandom(len(raw))
        elif how is Damage.TRUNCATED:
            spoilt = raw[:-1]
        elif how is Damage.EMPTIED:
            spoilt = b""
        elif how is Damage.SWAPPED and other is not None:
            theirs = self._path(other).read_bytes()
            spoilt = raw[:begin] + theirs[begin:]
            _replace(self._path(other), theirs[:begin] + raw[begin:])
        elif other is not None:  # MISPLACED, FOREIGN
            spoilt = self._path(other).read_bytes()
        else:
            inverted = bytes(byte ^ 0xFF for byte in raw[begin:])
            version = b"0" if how is Damage.OLDER_VERSION else b"9"
            header = _VERSION.sub(rb"\g<1>" + version, raw[:begin])
            spoilt = _CHECKSUM.sub(rb"\g<1>" + xxhash.xxh3_128_hexdigest(inverted).encode(), header) + inverted
        _replace(self._path(item), spoilt)

    def left_overs(self) -> list[str]:
        return [name for _, _, names in os.walk(self._root) for name in names if not _ITEM.fullmatch(name)]

    def restore(self) -> None:
        self.start()
        self.free()
        self.unslow()

    def close(self) -> None:
        self.unslow()
        self._volume.close()

    def _fresh(self) -> dict[str, str]:
        self._num_fresh += 1
        folder = self._volume.folder / f"fresh-{self._num_fresh}"
        folder.mkdir()
        return {"shared_storage_path": str(folder)}

    def _path(self, item: StoredItem) -> Path:
        return self._root / item.namespace[:16] / item.key[:2] / f"{item.key}.safetensors"


def _replace(path: Path, content: bytes) -> None:
    """As a whole, and with a new inode: whoever has the old one open keeps it."""
    aside = path.with_suffix(".spoilt")
    aside.write_bytes(content)
    aside.rename(path)
