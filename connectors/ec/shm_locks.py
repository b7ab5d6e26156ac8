"""Locks between the processes of a node, kept by the kernel: whoever dies, however, holds nothing any more.

Each lock is one byte far behind the end of the arena's file, taken as an open-file-description lock (fcntl(2),
F_OFD_SETLK). Unlike process ids those mean the same in every container that shares the file, and unlike lockf's they
are not lost when another part of this process closes the same file. (A process that forks without exec shares its locks
with the child; ours do not.)

    MUTEX      exclusive   for microseconds: whoever reads or changes the index
    GROW       exclusive   whoever asks the file system for more of the arena
    ADMIN      exclusive   whoever decides whether the file is to be removed
    ATTACHED   shared      everyone who uses the arena; exclusive is a proof that nobody else does
    SLOTS + n  shared      everyone who reads or writes the item in slot n: a *pin*
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import struct
import threading
import time
from types import TracebackType

from connectors.ec.store import StoreError

_BASE = 1 << 40
MUTEX, GROW, ADMIN, ATTACHED = _BASE, _BASE + 1, _BASE + 2, _BASE + 3
SLOTS = _BASE + 4096

#: Nobody who lives holds an exclusive lock for a hundredth of that.
LOCK_TIMEOUT_S = 1.0
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock where off_t has 64 bits: type, whence, start, length, process


class FileLocks:
    """The locks of one open file description. Any thread; two threads of one description do not exclude each other."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def try_lock(self, byte: int, *, shared: bool = False) -> bool:
        """Whether the lock is ours now. A lock that was held as shared becomes exclusive, or stays as it was."""
        kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def lock(self, byte: int, timeout_s: float = LOCK_TIMEOUT_S, *, shared: bool = False) -> None:
        """Raises StoreError after `timeout_s`: the holder has been stopped, or does what it should not."""
        # The kernel can wait as well, but has no time limit for it.
        deadline_s = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while not self.try_lock(byte, shared=shared):
            if time.monotonic() > deadline_s:
                raise StoreError(f"another process has held the arena's lock for {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def unlock(self, byte: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, byte, 1, 0))

    def unlock_all(self) -> None:
        """Closing the file is not enough: a mapping holds another descriptor of it."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, _BASE, 0, 0))

    def is_held_elsewhere(self, byte: int, num_bytes: int = 1) -> bool:
        """Whether another description, of whatever process, holds one of these locks, shared or not."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, 0, byte, num_bytes, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class Mutex:
    """`with mutex:` excludes the other threads of this object and everyone else who has the arena open. Raises
    StoreError where that takes longer than LOCK_TIMEOUT_S."""

    def __init__(self, locks: FileLocks, byte: int) -> None:
        self._locks = locks
        self._byte = byte
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        if not self._threads.acquire(timeout=LOCK_TIMEOUT_S):
            raise StoreError(f"another thread has held the arena's lock for {LOCK_TIMEOUT_S:g} s")
        try:
            self._locks.lock(self._byte)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._locks.unlock(self._byte)
        finally:
            self._threads.release()


class Pins:
    """Which slots this description reads or writes, and whether anybody does. Any thread.

    A pin is taken under the arena's mutex and may be given up without it. The threads of one description share one lock
    a slot, so they are counted.
    """

    def __init__(self, locks: FileLocks) -> None:
        self._locks = locks
        self._counts: dict[int, int] = {}
        self._threads = threading.Lock()

    def pin(self, slot: int) -> None:
        """Raises StoreError where the kernel refuses, which it does only to those who may not lock at all."""
        with self._threads:
            count = self._counts.get(slot, 0)
            if not count and not self._locks.try_lock(SLOTS + slot, shared=True):
                raise StoreError("an item's lock is held by a stranger")
            self._counts[slot] = count + 1

    def unpin(self, slot: int) -> None:
        with self._threads:
            count = self._counts.pop(slot) - 1
            if count:
                self._counts[slot] = count
            else:
                # After the arena was given up by force the descriptor may be gone, and the lock with it.
                with contextlib.suppress(OSError):
                    self._locks.unlock(SLOTS + slot)

    def is_pinned(self, slot: int) -> bool:
        """By anybody, this object included."""
        with self._threads:
            return slot in self._counts or self._locks.is_held_elsewhere(SLOTS + slot)

    def are_any(self, num_slots: int) -> bool:
        """Whether anybody has pinned any of the first `num_slots`: one question to the kernel."""
        with self._threads:
            return bool(self._counts) or self._locks.is_held_elsewhere(SLOTS, num_slots)
