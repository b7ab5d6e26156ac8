"""A folder of items: where each lies, how it becomes visible, and what may be cleared away.

    <root>/<first 16 digits of the namespace>/<first 2 digits of the key>/<key>.safetensors
    <root>/…/.<key>.<16 random digits>.tmp      being written, or left behind by a writer that died

Two levels, because one folder of a million files is slow on most file systems. Everything in a path is hexadecimal
digits that we have checked. Methods block on the file system and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from connectors.ec.item_file import check_item_file, read_item_file, write_item_file
from connectors.ec.store import ECStore, ItemError, LoadTarget, SaveSource, is_digest

log = logging.getLogger(__name__)

#: No writer takes this long for one item; what is older was left behind.
_ABANDONED_AFTER_S = 600.0
_NAMESPACE_FOLDER = re.compile(r"[0-9a-f]{16}")
_KEY_FOLDER = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


class FolderStore(ECStore):
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

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return [self._has(key) for key in keys]

    def _has(self, key: str) -> bool:
        try:
            os.stat(self.path_of(key))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, key: str, target: LoadTarget) -> None:
        """A damaged item is removed: while it can be seen, nobody makes it again."""
        path = self.path_of(key)
        try:
            read_item_file(path, target, self._namespace, key)
        except ItemError as error:
            if error.damaged:
                self._remove_damaged(path, key)
            raise
        except FileNotFoundError:
            raise ItemError("item is not in the store") from None

    def write(self, key: str, source: SaveSource) -> None:
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
            write_item_file(temporary, source.embeds, self._namespace, key)
            source.check()
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def maintain(self, closing: threading.Event) -> None:
        removed = self.sweep(_ABANDONED_AFTER_S, closing.is_set)
        if removed:
            log.info("removed %d files that dead writers left in the encoder cache", removed)

    def close(self) -> None:
        """Nothing is held open."""

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
