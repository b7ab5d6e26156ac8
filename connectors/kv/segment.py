"""A producer's KV cache in memory that consumers on the same host can read, and a board of what is leased of it.

The memory is a memfd: it has no name in any file system, no size limit but the machine's, takes no page before it is
written to, and is gone with the last process that holds it, however that ended. A consumer gets its descriptor over a
Unix socket in the abstract namespace, whose name is 128 random bits that only the handle tells. Whoever can connect is
on the same host, in the same network namespace; no other test of "same host" is needed, or could be trusted more.

Three things keep the two sides from each other's memory. The kernel says who connects, and only the producer's own user
gets the descriptor. It is sealed: nobody can map it for writing any more, or make it shorter, which would end a reader
with SIGBUS. And a consumer looks at nothing but bytes, whose checksum the producer has sent.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import logging
import mmap
import os
import platform
import secrets
import socket
import struct
from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np
import torch

from connectors.kv.board import BOARD_BYTES, ChecksumBoard, MappedBoard
from connectors.kv.listener import Listener
from connectors.kv.rows import Bytes

log = logging.getLogger(__name__)

_NAME = "\0triptych-kv-"
_F_SEAL_FUTURE_WRITE = 0x10  # not in module fcntl
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
_MAX_OFFER_BYTES = 1024
#: How long a consumer waits for the descriptor; the producer's thread may be at work on a message.
_OFFER_S = 1.0
_BACKLOG = 16


class SameHost(enum.StrEnum):
    """When blocks are read from the producer's memory instead of pulled over the network."""

    AUTO = "auto"  # where that can be done
    NEVER = "never"
    ALWAYS = "always"  # a pull from another host fails


class UnreachableError(Exception):
    """The producer's memory cannot be mapped here; holds the reason."""


class _Offer(msgspec.Struct, array_like=True, frozen=True):
    """What comes with the descriptor."""

    instance: str
    num_blocks: int
    row_bytes: int


def host_identity() -> str:
    """This host's name and the first digits of its boot's identity, for errors that must tell two hosts apart."""
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return f"{platform.node()[:255]}/{boot_id}"


class SharedSegment:
    """The producer's end. Raises OSError from the constructor where this system has no such memory."""

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self.name = secrets.token_hex(16)
        self._offer = b""
        self._fds: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener = Listener(self._socket)
        try:
            memory = _with_large_pages(self._new_memory(num_bytes))
            self.board = ChecksumBoard(self._new_memory(BOARD_BYTES))
            self._socket.bind(_NAME + self.name)
        except OSError:
            self.close()
            raise
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)  # [num_bytes]; it keeps the mapping

    def _new_memory(self, num_bytes: int) -> mmap.mmap:
        """Sealed; its descriptor goes to the consumers."""
        fd = os.memfd_create("triptych-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._fds.append(fd)
        os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return memory

    def holds(self, blocks: torch.Tensor) -> bool:
        """Whether a cache begins where the segment does."""
        return blocks.data_ptr() == self.memory.data_ptr()

    def offer(self, instance: str, num_blocks: int, row_bytes: int) -> None:
        """Let consumers in from now on."""
        self._offer = msgspec.msgpack.encode(_Offer(instance, num_blocks, row_bytes))
        self._socket.listen(_BACKLOG)

    def serve(self, ready: Collection[int]) -> None:
        """Hand the descriptors to the consumers that wait for them, if that is among the descriptors `ready`. The
        serving thread; never waits."""
        for consumer in self.listener.accepted(ready):
            # A consumer that is gone already, or of another user, gets nothing and pulls over the network.
            with consumer, contextlib.suppress(OSError):
                consumer.setblocking(False)
                credentials = consumer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", credentials)[1] == os.getuid():
                    socket.send_fds(consumer, [self._offer], self._fds)

    def close(self) -> None:
        """Let nobody in any more. The memory stays while a tensor or a consumer uses it. Idempotent."""
        self.listener.close()
        while self._fds:
            os.close(self._fds.pop())


class MappedSegment:
    """The consumer's end: `rows`, `[num_blocks, row_bytes]`, read-only, and `board`. They may be read for as long as
    they are held, also when the producer has died. The constructor waits a second at most; raises UnreachableError."""

    def __init__(self, name: str, instance: str, row_bytes: int) -> None:
        self.name = name
        fds: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                asking.settimeout(_OFFER_S)
                asking.connect(_NAME + name)
                data, fds, _flags, _address = socket.recv_fds(asking, _MAX_OFFER_BYTES, 2)
            if len(fds) != 2:
                raise UnreachableError("the producer runs as another user")
            offer = msgspec.msgpack.decode(data, type=_Offer)
            if (offer.instance, offer.row_bytes) != (instance, row_bytes):
                raise UnreachableError("the memory is another engine's")
            num_bytes = offer.num_blocks * row_bytes
            memory = _with_large_pages(_mapped(fds[0], num_bytes))
            self.board = MappedBoard(_mapped(fds[1], BOARD_BYTES))
        except ConnectionRefusedError:
            raise UnreachableError("the producer is on another host or in another network namespace") from None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise UnreachableError(f"the producer's memory cannot be mapped: {error}") from None
        finally:
            for fd in fds:
                os.close(fd)
        self.rows: Bytes = np.frombuffer(memory, dtype=np.uint8).reshape(-1, row_bytes)  # it keeps the mapping


def private_memory(num_bytes: int) -> torch.Tensor | None:
    """`[num_bytes]` uint8 of this process alone, on large pages, which is where blocks are best copied to. None where
    it cannot be had."""
    try:
        memory = _with_large_pages(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, ValueError):
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < num_bytes:
        raise UnreachableError("the memory might be cut short under our eyes")
    return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)


def _with_large_pages(memory: mmap.mmap) -> mmap.mmap:
    """Where the system has them to give: with small ones a tenth of a copy is spent on finding them."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
