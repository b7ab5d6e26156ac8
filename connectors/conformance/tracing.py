"""Sees what a thread calls: I/O where there must be none, listings where they cost too much."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

#: Events of Python's audit hooks that mean I/O (`open` includes everything that opens a file).
_IO_EVENTS = frozenset(
    {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.utime"}
    | {"os.posix_spawn", "os.fork", "os.system", "subprocess.Popen", "mmap.__new__", "fcntl.flock", "fcntl.lockf"}
    | {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "sqlite3.connect"}
    | {"shutil.rmtree", "shutil.copyfile", "glob.glob", "time.sleep"}
)
_LISTING_EVENTS = frozenset({"os.listdir", "os.scandir", "glob.glob", "pathlib.Path.glob", "pathlib.Path.rglob"})
#: Modules whose functions written in C are I/O, or waiting, by themselves; audit hooks do not see all of these.
_IO_MODULES = frozenset({"posix", "_io", "_socket", "select", "fcntl", "_ssl", "mmap", "_posixshmem", "_sqlite3"})
_HARMLESS = frozenset({"getpid", "fspath", "urandom", "cpu_count", "get_terminal_size", "register_at_fork", "_exit"})
_IO_TYPES = frozenset({"socket", "FileIO", "Connection", "Cursor", "epoll", "poll", "BufferedReader", "BufferedWriter"})
_WAITING = frozenset({"sleep"})

_trace: CallTrace | ListingTrace | None = None  # the one that listens; an audit hook cannot be taken out again
_hooked = False


class CallTrace:
    """I/O of this thread, within the context, by the names of functions. Memory, locks and waking a thread of the
    connector's own over a socket pair are not I/O."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._thread = threading.get_ident()
        self._is_paused = False

    def __enter__(self) -> CallTrace:
        _listen(self)
        sys.setprofile(self._profile)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        _listen(None)

    def pause(self, call: Callable[[], Any]) -> None:
        """Something of the kit's own."""
        self._is_paused = True
        try:
            call()
        finally:
            self._is_paused = False

    def event(self, name: str) -> None:
        if name in _IO_EVENTS and threading.get_ident() == self._thread:
            self._add(name)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call" or self._is_paused:
            return
        name = str(getattr(argument, "__name__", ""))
        owner = type(getattr(argument, "__self__", None)).__name__
        module = str(getattr(argument, "__module__", None) or "")
        if name == "send" and _is_pair(getattr(argument, "__self__", None)):
            return
        if name in _WAITING or (name not in _HARMLESS and (module in _IO_MODULES or owner in _IO_TYPES)):
            self._add(f"{module or owner}.{name}")

    def _add(self, name: str) -> None:
        if not self._is_paused and name not in self.calls and len(self.calls) < 8:
            self.calls.append(name)


class ListingTrace:
    """Listings of folders by any thread of this process, within the context."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> ListingTrace:
        _listen(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _listen(None)

    def event(self, name: str) -> None:
        if name in _LISTING_EVENTS and name not in self.calls:
            self.calls.append(name)


def _is_pair(owner: object) -> bool:
    """A `socketpair` with which a thread of the connector's own is woken: that leads nowhere else."""
    return isinstance(owner, socket.SocketType) and owner.family == socket.AF_UNIX and not owner.getsockname()


def _listen(trace: CallTrace | ListingTrace | None) -> None:
    global _trace, _hooked
    _trace = trace
    if not _hooked:
        _hooked = True
        sys.addaudithook(lambda name, arguments: _trace.event(name) if _trace is not None else None)
