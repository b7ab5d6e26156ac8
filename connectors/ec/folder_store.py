"""A folder of items: where each lies, how it becomes visible, and when it counts as gone.

    <root>/<first 16 digits of the namespace>/<first 2 digits of the key>/<key>.safetensors
    <root>/…/.<key>.<16 random digits>.tmp      being written, or left behind by a writer that died

Two levels, because one folder of a million files is slow on most file systems. Everything in a path is hexadecimal
digits that we have checked. Of the file system it is assumed that a rename is atomic and that an opened file shows what
was written before its last close (NFS gives both), nothing else. Nothing is synced to disk: what a power cut spoils is
found by its checksum and made again. Methods block on the file system and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from connectors.ec.folder_upkeep import FolderUpkeep, Pace, used_ns
from connectors.ec.item_file import MAX_OVERHEAD_BYTES, check_item_file, read_item_file, write_item_file
from connectors.ec.store import ECStore, ItemError, LoadTarget, SaveSource, StoreError, is_digest

#: A producer's look-ups renew an item's time of use so often at most: each time is a write to the file system.
_TOUCH_AFTER_NS = 1_000_000_000
#: Times that the folders are made for one save, should others clear them away as empty.
_MAX_TRIES = 3


class FolderStore(ECStore):
    """The items of one namespace under one root. Shares nothing with other objects or processes but the files.

    `capacity_bytes`: of all namespaces under `root` together, kept by `maintain`; None: no limit. `ttl_s`: an item that
    was neither saved nor loaded for so long is absent, here at once and for others when `maintain` has removed it;
    None: for ever. `renews`: an item that a look-up finds counts as used, though not towards `ttl_s`.

    Under another user than the one who saved an item, a load cannot always note down its time of use; where no reader
    may, the oldest items go first, used or not.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        *,
        capacity_bytes: int | None = None,
        ttl_s: float | None = None,
        renews: bool = False,
        pace: Pace | None = None,
    ) -> None:
        if not is_digest(namespace):
            raise ValueError("a namespace has 64 hexadecimal digits")
        self._root = str(root)
        self._namespace = namespace
        self._folder = f"{root}/{namespace[:16]}"
        self._capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._renews = renews
        self._upkeep = FolderUpkeep(self._root, capacity_bytes, ttl_s, pace)
        self._closed = False
        self._outer_device = _device_around(root)
        self._is_in_memory = _is_in_memory(root)

    def path_of(self, key: str) -> str:
        """Where the item lies or would lie. Raises ItemError for what is not a key."""
        if not is_digest(key):
            raise ItemError("not an item's key")
        return f"{self._folder_of(key)}/{key}.safetensors"

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """One `stat` a key; one more where any is absent."""
        found = [self._has(key) for key in keys]
        if not all(found):
            self._check_root()
        return found

    def read(self, key: str, target: LoadTarget) -> None:
        """A damaged item is removed: while it can be seen, nobody makes it again."""
        path = self.path_of(key)
        try:
            with _closing(_open(path, os.O_RDONLY)) as fd:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise ItemError("item is not a file")
                if self._is_expired(status):
                    raise ItemError(f"item was not used for ttl_s={self._ttl_s:g}")
                read_item_file(fd, target, self._namespace, key, self._check_open, in_memory=self._is_in_memory)
                with contextlib.suppress(OSError):  # another user's file, or a read-only mount
                    os.utime(fd)
        except ItemError as error:
            if error.damaged:
                self._remove_damaged(path, key)
            raise
        except (FileNotFoundError, NotADirectoryError):
            self._check_root()
            raise ItemError("item is not in the store") from None
        except OSError as error:
            if error.errno != errno.ESTALE:  # NFS: removed by another machine while we had it open
                raise
            self._check_root()
            raise ItemError("item was removed while it was read") from None

    def write(self, key: str, source: SaveSource) -> None:
        path = self.path_of(key)
        self._check_size(source.embeds.nbytes)
        if self._is_whole(path, key, renew=True):
            return
        folder = self._folder_of(key)
        temporary = f"{folder}/.{key}.{secrets.token_hex(8)}.tmp"

        def check() -> None:
            self._check_open()
            source.check()

        try:
            with _closing(self._create(folder, temporary)) as fd:
                num_bytes = write_item_file(fd, source.embeds, self._namespace, key, check)
            check()
            os.replace(temporary, path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._upkeep.short_of_room(source.embeds.nbytes)
            raise
        self._upkeep.saved(folder, num_bytes)

    def maintain(self, closing: threading.Event) -> None:
        self._upkeep.run(closing)

    def take_counters(self) -> Mapping[str, int]:
        return {"evictions": self._upkeep.take_evictions()}

    def close(self) -> None:
        """Nothing is held open. Reads and writes under way end within a chunk."""
        self._closed = True
        self._upkeep.close()

    def _folder_of(self, key: str) -> str:
        return f"{self._folder}/{key[:2]}"

    def _has(self, key: str) -> bool:
        path = self.path_of(key)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ESTALE:  # the caller then looks at the root, which tells one from the other
                return False
            raise
        if self._is_expired(status):
            return False
        now_ns = time.time_ns()
        if self._renews and now_ns - used_ns(status) > _TOUCH_AFTER_NS:
            with contextlib.suppress(OSError):  # as in `read`
                os.utime(path, ns=(now_ns, status.st_mtime_ns))
        return True

    def _is_expired(self, status: os.stat_result) -> bool:
        return self._ttl_s is not None and time.time() - status.st_mtime > self._ttl_s

    def _is_whole(self, path: str, key: str, *, renew: bool = False) -> bool:
        # A save of what is there already is rare, and likely one because a reader found it damaged: so look inside.
        try:
            with _closing(_open(path, os.O_RDONLY)) as fd:
                if self._is_expired(os.fstat(fd)):
                    return False
                check_item_file(fd, self._namespace, key, self._check_open)
                if renew:
                    with contextlib.suppress(OSError):
                        os.utime(fd)
        except (ItemError, OSError):
            return False
        return True

    def _remove_damaged(self, path: str, key: str) -> None:
        # Somebody may have replaced it since, by a good one: look again. What is lost between this look and the removal
        # is made again, as any absent item is.
        if not self._is_whole(path, key):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _create(self, folder: str, path: str) -> int:
        """A new file, with what the umask leaves of mode 0666: stages may run as different users of one group."""
        for _ in range(_MAX_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._check_root()
            # Not `makedirs`: where the root has gone, say because a volume was unmounted, it must not come back as an
            # ordinary folder that only this machine sees.
            for missing in (self._folder, folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(missing)
        raise StoreError("the folders of the store are removed as soon as they are made")

    def _check_size(self, num_bytes: int) -> None:
        if self._capacity_bytes is not None and num_bytes + MAX_OVERHEAD_BYTES > self._capacity_bytes:
            raise ItemError(f"an item of {num_bytes} bytes does not fit into capacity_bytes={self._capacity_bytes}")

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the connector is closed")

    def _check_root(self) -> None:
        """Tells a store that is down from an item that is absent. Raises StoreError."""
        try:
            status = os.stat(self._root)
        except OSError as error:
            raise StoreError(f"the storage folder cannot be reached: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise StoreError("the storage folder is no folder any more")
        if status.st_dev == self._outer_device:
            raise StoreError("the volume of the storage folder is not mounted any more")


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    """NFS reports at the close what it could not write, so that raises too."""
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


def _device_around(root: Path) -> int | None:
    """Where `root` is a mount point: the device of the folder it lies in, which `root` will have once unmounted."""
    try:
        inside, outside = os.stat(root).st_dev, os.stat(root.parent).st_dev
    except OSError:
        return None
    return outside if outside != inside else None


def _is_in_memory(root: Path) -> bool:
    """Whether `root` lies on a tmpfs, as far as the system says."""
    try:
        device = os.stat(root).st_dev
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    # "36 35 98:0 / /mnt rw … - ext4 /dev/sda1 rw": the third is the device, the one after the dash the type.
    return any(line.split(" ", 3)[2] == number and " - tmpfs " in line for line in mounts if line.count(" ") > 3)
