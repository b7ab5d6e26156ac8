"""How an arena's file is found, made, judged and, where it is of no use, replaced.

A fresh one is made aside, as a file without a name, and linked into place whole, so there is never half an arena to be
found, and a process killed meanwhile leaves nothing. What stands at the path may be

    an arena of ours            used, and put in order first
    … cut short or damaged      removed; those who still have it open find out and come to the new one
    … of another version, or    removed if no process has it open, else refused with both values; `triptych` puts the
      another capacity          version into the name that it chooses itself, so two versions do not meet there
    anything else               refused: it is not ours to remove. Likewise a link, a folder, another user's file
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from connectors.ec.shm_arena import ADMIN_TIMEOUT_S, Arena, identity_of
from connectors.ec.shm_layout import STATIC_BYTES, VERSION, Geometry, HeaderError, pack_header, parse_header, uptime_s
from connectors.ec.shm_locks import ADMIN, ATTACHED, FileLocks
from connectors.ec.store import ItemError, StoreError
from connectors.options import EC_EXTRA
from core.errors import ConfigError

log = logging.getLogger(__name__)

PATH_OPTION = f"{EC_EXTRA} path"
CAPACITY_OPTION = f"{EC_EXTRA} capacity_bytes"
#: Of a capacity that nobody set: this, or half of what the file system has left.
DEFAULT_CAPACITY_BYTES = 1 << 30
#: An arena comes and goes at most so often while one process attaches.
_ATTEMPTS = 20


def attach_arena(
    path: Path, capacity_bytes: int | None, creates: bool, on_evict: Callable[[int], None]
) -> Arena | None:
    """The arena at `path`; where there is none or an unusable one, a fresh one if `creates`, else None.

    `capacity_bytes`: None takes what is there, or a size that suits the file system. Raises ConfigError for what the
    operator is to change, StoreError where another process is in the way, OSError.
    """
    for _ in range(_ATTEMPTS):
        try:
            # What is not an arena may be a pipe or a device, which must not be waited for.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            if not creates:
                return None
            made = _create(path, capacity_bytes)
            if made is None:  # somebody else was faster
                continue
            fd = made
        with _closing_on_error(fd):
            arena = _open(path, fd, capacity_bytes, creates, on_evict)
        if arena is not None:
            _repair(arena)
            return arena
        os.close(fd)
    raise StoreError("the arena comes and goes")


def _open(
    path: Path, fd: int, capacity_bytes: int | None, creates: bool, on_evict: Callable[[int], None]
) -> Arena | None:
    """None: the file has gone, or was not fit for use and is gone now; look again."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(PATH_OPTION, str(path), "is not a regular file")
    if found.st_uid != os.geteuid():
        raise ConfigError(PATH_OPTION, str(path), f"belongs to user {found.st_uid}, not to {os.geteuid()}")
    locks = FileLocks(fd)
    locks.lock(ADMIN, ADMIN_TIMEOUT_S)
    if not _leads_to(path, found):
        return None
    try:
        geometry, arena_id = parse_header(os.pread(fd, STATIC_BYTES, 0))
        if found.st_size != geometry.file_bytes:
            raise HeaderError("it is cut short", VERSION)
    except HeaderError as error:
        refusal = ConfigError(PATH_OPTION, str(path), f"this file cannot be used: {error}")
        if error.version is None and found.st_size:
            raise refusal from None  # not ours to remove
        if error.version != VERSION and not locks.try_lock(ATTACHED):
            raise refusal from None
        log.warning("%s; it is made anew", refusal)
        os.unlink(path)
        return None
    if creates and capacity_bytes is not None and Geometry.for_capacity(capacity_bytes) != geometry:
        reason = f"the arena in use holds {geometry.capacity_bytes} bytes"
        if not locks.try_lock(ATTACHED):
            raise ConfigError(CAPACITY_OPTION, capacity_bytes, reason)
        os.unlink(path)
        return None
    locks.lock(ATTACHED, ADMIN_TIMEOUT_S, shared=True)
    locks.unlock(ADMIN)
    return Arena(path, fd, locks, geometry, arena_id, on_evict)


def _repair(arena: Arena) -> None:
    try:
        with arena.locked() as index:
            index.repair(uptime_s())
    except (StoreError, ItemError, OSError):
        log.warning("the encoder cache's arena is busy or gone again; it is used as it is")


def _create(path: Path, capacity_bytes: int | None) -> int | None:
    """A fresh, empty arena under `path`, open; None where something is there by now."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A file without a name: should this process die now, nothing is left.
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with _closing_on_error(fd):
            geometry = _fitting_geometry(fd, capacity_bytes)
            os.ftruncate(fd, geometry.file_bytes)
            try:
                os.posix_fallocate(fd, 0, geometry.tables_end)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise _does_not_fit(capacity_bytes, geometry.tables_end, 0) from None
            os.pwrite(fd, pack_header(geometry, secrets.token_bytes(16)), 0)
            try:
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
            except FileExistsError:
                os.close(fd)
                return None
            return fd
    finally:
        os.close(folder)


def _fitting_geometry(fd: int, capacity_bytes: int | None) -> Geometry:
    volume = os.fstatvfs(fd)
    free_bytes = volume.f_bavail * volume.f_frsize
    is_limited = volume.f_blocks > 0  # a tmpfs may have no limit
    if capacity_bytes is None:
        wanted = min(DEFAULT_CAPACITY_BYTES, free_bytes // 2) if is_limited else DEFAULT_CAPACITY_BYTES
        geometry = Geometry.for_capacity(max(wanted, 1 << 20))
    else:
        geometry = Geometry.for_capacity(capacity_bytes)
    needed_bytes = geometry.tables_end + geometry.capacity_bytes
    if is_limited and needed_bytes > free_bytes:
        raise _does_not_fit(capacity_bytes, needed_bytes, free_bytes)
    return geometry


def _does_not_fit(capacity_bytes: int | None, needed_bytes: int, free_bytes: int) -> ConfigError:
    reason = f"needs {needed_bytes} bytes where the file system has {free_bytes} left"
    return ConfigError(CAPACITY_OPTION, capacity_bytes, reason)


def _leads_to(path: Path, found: os.stat_result) -> bool:
    try:
        return identity_of(os.stat(path, follow_symlinks=False)) == identity_of(found)
    except OSError:
        return False


@contextlib.contextmanager
def _closing_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise
