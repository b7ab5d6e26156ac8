"""An arena as this process has it: the open file, its mapping, its locks. `shm_attach.py` says how it comes about.

    users come and go ──▶ detach: no more users; when the last has left, the last process out removes the file
          │
          └─ the file was removed, replaced, cut short or scribbled over: `is_current` is False, and the store detaches
             and attaches again

A file is removed only by who holds its ADMIN lock and has seen, under it, that the path still leads to that file.

Memory is taken as items come, a stretch at a time, and before it is touched: a write to a mapping whose file system is
full would kill the process (SIGBUS), a refused `posix_fallocate` is an error like any other. For the same reason the
size of the file is looked at before every use of it; who cuts a file short between that look and the use, within a
microsecond or so, can still kill us.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from connectors.ec.shm_index import Index
from connectors.ec.shm_layout import STATIC_BYTES, Geometry
from connectors.ec.shm_locks import ADMIN, ATTACHED, GROW, MUTEX, FileLocks, Mutex, Pins
from connectors.ec.store import ItemError, StoreError

#: What is asked of the file system at a time.
_GROWTH_BYTES = 32 << 20
#: Pages are mapped so many bytes at a time, when they are first used.
_REGION_BYTES = 1 << 20
_FOLLOW_PATH_S = 0.5
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older ones fault the pages in one by one
#: Not `mmap.madvise`, which keeps the interpreter's lock for as long as the system takes to clear the pages.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
#: To be waited for by who attaches or leaves.
ADMIN_TIMEOUT_S = 0.5


class ArenaLostError(ItemError):
    """The arena under an operation has been removed, replaced or cut short; what was in it is gone."""


class _Guard:
    """What `Arena.locked` returns; a generator would take longer than most of what is done under it."""

    def __init__(self, arena: Arena, mutex: Mutex) -> None:
        self._arena = arena
        self._mutex = mutex

    def __enter__(self) -> Index:
        self._mutex.__enter__()
        try:
            if not self._arena.is_current():
                raise ArenaLostError("the arena was removed, replaced or cut short")
            return self._arena.index
        except BaseException:
            self._mutex.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mutex.__exit__(kind, value, trace)


class Arena:
    """One attachment. Made by `attach_arena`; counts its users and frees itself with the last of them.

    `locked` gives the index; `pins` says which slots are in use. Any thread.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        locks: FileLocks,
        geometry: Geometry,
        arena_id: bytes,
        on_evict: Callable[[int], None],
    ) -> None:
        self.path = path
        self.geometry = geometry
        self._guard = _Guard(self, Mutex(locks, MUTEX))
        self.pins = Pins(locks)
        self._growing = Mutex(locks, GROW)
        self._fd = fd
        self._locks = locks
        self._file_bytes = geometry.file_bytes  # properties of a geometry are computed each time
        self._data_offset = geometry.data_offset
        self._identity = identity_of(os.fstat(fd))
        self._map = mmap.mmap(fd, geometry.file_bytes)
        self._follow_path_at_s = 0.0
        self._static = self._map[:STATIC_BYTES]
        self._bytes = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.index = Index(self._map, geometry, arena_id, self.pins, on_evict)
        self._mapped = bytearray(-(-geometry.file_bytes // _REGION_BYTES))
        self._users = 0
        self._closing = False
        self._is_free = False
        self._changed = threading.Condition()

    # ---- users ----

    def enter(self) -> bool:
        """Count one more user. False once the arena is being given up."""
        with self._changed:
            if self._closing:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        with self._changed:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self._free()

    def detach(self, timeout_s: float) -> None:
        """Let no more users in and wait for those who are there; remove the file if no other process has it open. A
        user who stays longer than `timeout_s` frees everything when it leaves. Call once."""
        with self._changed:
            self._closing = True
            users = self._users
        if not users:
            self._free()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._is_free, timeout_s)

    def _free(self) -> None:
        try:
            with contextlib.suppress(OSError, StoreError):
                self._locks.lock(ADMIN, ADMIN_TIMEOUT_S)
                if self._locks.try_lock(ATTACHED):
                    self._unlink()
            with contextlib.suppress(OSError):
                self._locks.unlock_all()
        finally:
            os.close(self._fd)
            del self.index
            # A stack trace that somebody keeps may still hold a piece of the mapping, which then goes with it.
            with contextlib.suppress(BufferError):
                self._bytes.release()
                self._map.close()
            with self._changed:
                self._is_free = True
                self._changed.notify_all()

    def locked(self) -> AbstractContextManager[Index]:
        """The index, for as long as the block lasts and nobody else looks at it: microseconds. Its begin raises
        StoreError where the mutex is not to be had, ArenaLostError where the file is not what it was."""
        return self._guard

    # ---- what may have happened to the file ----

    def is_current(self) -> bool:
        """Whether this is still the file that the path leads to, whole and with its header as it was.

        A file that was removed or replaced has no name left, which is quickly seen; one that was moved away keeps one,
        so the path is followed as well, now and then.
        """
        if not self._is_whole() or self._map[:STATIC_BYTES] != self._static:
            return False
        now_s = time.monotonic()
        if now_s < self._follow_path_at_s:
            return True
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        if identity_of(found) != self._identity:
            return False
        self._follow_path_at_s = now_s + _FOLLOW_PATH_S
        return True

    def _is_whole(self) -> bool:
        found = os.fstat(self._fd)
        return found.st_size == self._file_bytes and found.st_nlink > 0

    def remove(self) -> None:
        """Remove the file, if the path still leads to it: it is of no use to anyone. One thread at a time. Raises
        StoreError, OSError."""
        self._locks.lock(ADMIN, ADMIN_TIMEOUT_S)
        try:
            self._unlink()
        finally:
            self._locks.unlock(ADMIN)

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if identity_of(os.stat(self.path, follow_symlinks=False)) == self._identity:
                os.unlink(self.path)

    # ---- memory ----

    def chunk(self, offset: int, num_bytes: int) -> memoryview:
        """`num_bytes` of an item's blocks from `offset` on, in the file. To be asked for anew for every chunk: raises
        ArenaLostError where the file has been cut short, StoreError while the arena is being given up."""
        if self._closing:
            raise StoreError("the arena is being closed")
        if not self._data_offset <= offset <= offset + num_bytes <= self._file_bytes:
            raise ItemError("an item's place is outside the arena", damaged=True)
        if not self._is_whole():
            raise ArenaLostError("the arena was removed, replaced or cut short")
        first, last = offset // _REGION_BYTES, (offset + num_bytes - 1) // _REGION_BYTES
        for region in range(first, last + 1):
            if not self._mapped[region]:
                self._populate(region)
        return self._bytes[offset : offset + num_bytes]

    def _populate(self, region: int) -> None:
        # Pages faulted in one by one cost several times what copying them does. Those behind the committed ones are
        # left alone: to touch them is to take memory.
        begin = region * _REGION_BYTES
        end = min(begin + _REGION_BYTES, self._file_bytes)
        if end <= self._data_offset + self.index.num_committed() * self.geometry.block_bytes:
            _madvise(self._address + begin, end - begin, _MADV_POPULATE_WRITE)  # an error is no matter
            self._mapped[region] = 1

    def grow(self, num_blocks: int) -> bool:
        """Ask the file system for room for `num_blocks` more, or for more than that. Whether there is any more than
        before, by whoever's doing. Raises StoreError."""
        before = self.index.num_committed()
        with self._growing:
            committed = self.index.num_committed()
            if committed > before:
                return True
            left = self.geometry.num_blocks - committed
            for wanted in (max(num_blocks, _GROWTH_BYTES // self.geometry.block_bytes), num_blocks):
                if self._commit(committed, min(wanted, left)):
                    return True
            return False

    def _commit(self, committed: int, num_blocks: int) -> bool:
        if not num_blocks:
            return False
        begin = self._data_offset + committed * self.geometry.block_bytes
        try:
            os.posix_fallocate(self._fd, begin, num_blocks * self.geometry.block_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return False
        with self.locked() as index:
            index.set_committed(committed + num_blocks)
        return True


def identity_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
