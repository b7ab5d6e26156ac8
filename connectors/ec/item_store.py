"""A folder of items: where each lies, how it becomes visible, and what may be cleared away.

    <root>/<first 16 digits of the namespace>/<first 2 digits of the key>/<key>.safetensors
    <root>/…/.<key>.<16 random digits>.tmp      being written, or left behind by a writer that died

Two levels, because one folder of a million files is slow on most file systems. Everything in a path is hexadecimal
digits that we have checked. Methods block on the file system and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import torch

from connectors.ec.item_file import ItemError, check_item_file, read_item_file, write_item_file

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAMESPACE_FOLDER = re.compile(r"[0-9a-f]{16}")
_KEY_FOLDER = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


def is_digest(text: str) -> bool:
    """Whether `text` has the form of a key or of a namespace."""
    return _DIGEST.fullmatch(text) is not None


class ItemStore:
    """The items of one namespace under one root. Shares nothing with other objects or processes but the files."""

    def __init__(self, root: Path, namespace: str) -> None:
        if not is_digest(namespace):
            raise ValueError("a namespace has 64 hexadecimal digits")
        self._root = root
        self._namespace = namespace
        self._folder = root / namespace[:16]

    def path_of(self, key: str) -> Path:
        """Where the item lies or would lie. Raises ItemError for what is not a key."""
        if not is_digest(key):
            raise ItemError("not an item's key")
        return self._folder / key[:2] / f"{key}.safetensors"

    def contains(self, key: str) -> bool:
        """Whether the item can be seen. False too where the folder is gone or does not answer."""
        try:
            os.stat(self.path_of(key))
        except (ItemError, OSError):
            return False
        return True

    def read(self, key: str, into: torch.Tensor) -> None:
        """Fill `into`, `[num_embeds, width]` in host memory. Raises ItemError and OSError. A damaged item is removed:
        while it can be seen, nobody makes it again."""
        path = self.path_of(key)
        try:
            read_item_file(path, into, self._namespace, key)
        except ItemError as error:
            if error.damaged:
                self._remove_damaged(path, key)
            raise
        except FileNotFoundError:
            raise ItemError("item is not in the store") from None

    def write(self, key: str, embeds: torch.Tensor) -> None:
        """Make the item visible, whole or not at all; where a whole one is already, leave it. Raises ItemError, OSError
        and safetensors' own errors."""
        path = self.path_of(key)
        if self._is_whole(path, key):
            return
        # Not `makedirs`: where the root has gone, say because a volume was unmounted, it must not come back as an
        # ordinary folder that only this machine sees.
        for folder in (self._folder, path.parent):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
        temporary = path.parent / f".{key}.{secrets.token_hex(8)}.tmp"
        try:
            write_item_file(temporary, embeds, self._namespace, key)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def sweep(self, older_than_s: float, stop: Callable[[], bool]) -> int:
        """Remove what dead writers of any namespace left behind, and return how many files. A file of that age has no
        living writer. Ends early when `stop()`; errors end the sweep of the folder they came from."""
        oldest_s = time.time() - older_than_s
        removed = 0
        for namespace_folder in _subfolders(self._root, _NAMESPACE_FOLDER):
            for folder in _subfolders(namespace_folder, _KEY_FOLDER):
                if stop():
                    return removed
                with contextlib.suppress(OSError), os.scandir(folder) as entries:
                    for entry in entries:
                        if _TEMPORARY.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < oldest_s:
                            os.unlink(entry.path)
                            removed += 1
        return removed

    def _is_whole(self, path: Path, key: str) -> bool:
        # A save of what is there already is rare, and likely one because a reader found it damaged: so look inside.
        try:
            check_item_file(path, self._namespace, key)
        except (ItemError, OSError):
            return False
        return True

    def _remove_damaged(self, path: Path, key: str) -> None:
        # Somebody may have replaced it since, by a good one: look again. What is lost between this look and the removal
        # is made again, as any absent item is.
        if not self._is_whole(path, key):
            with contextlib.suppress(OSError):
                path.unlink()


def _subfolders(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if name.fullmatch(entry.name) and entry.is_dir()]
    except OSError:
        return []
