"""The EC connector over one arena in shared memory: for stages that run on one node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from connectors.ec.shm_attach import PATH_OPTION
from connectors.ec.shm_layout import MAX_CAPACITY_BYTES, VERSION
from connectors.ec.shm_store import SharedMemoryStore
from connectors.ec.store import StoreError
from connectors.ec.store_connector import ECStoreConnector, StoreOptions
from core.errors import ConfigError

_DEFAULT_FOLDER = Path("/dev/shm")  # noqa: S108 - memory that processes share, private to the user by mode and owner


class SharedMemoryOptions(StoreOptions, frozen=True, kw_only=True):
    """The keys of the extra config.

    Without `path` all stages of one user and one namespace on a node meet by themselves. `capacity_bytes` is for items
    alone and is the producers' affair; without it, 1 GiB or half of what the file system has left, whichever is less.
    Memory is taken only as items come.
    """

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None  # a file on a memory-backed folder
    capacity_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=MAX_CAPACITY_BYTES)] | None = None
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None  # age at which an item is gone; None: never


class ECSharedMemoryConnector(ECStoreConnector):
    """Items in a file that every process maps; `shm_layout.py` says what stands in it.

    The file goes with the last process that closes its connector. If that one was killed the file stays, is used again
    by the next start with the same path, and goes with that.
    """

    options_type = SharedMemoryOptions

    def open_store(self, options: SharedMemoryOptions) -> SharedMemoryStore:
        produces = self.config.role.produces
        path = _path(options, self.config.namespace)
        store = SharedMemoryStore(
            path,
            self.config.namespace,
            capacity_bytes=options.capacity_bytes,
            ttl_s=options.ttl_s,
            creates=produces,
        )
        try:
            store.open()
        except OSError as error:
            reason = f"cannot be {'made or ' if produces else ''}opened: {error.strerror or error}"
            raise ConfigError(PATH_OPTION, str(path), reason) from error
        except StoreError:  # busy at this moment; it is opened when it is needed
            pass
        return store


def _path(options: SharedMemoryOptions, namespace: str) -> Path:
    if options.path is None:
        return _DEFAULT_FOLDER / f"triptych-ec-v{VERSION}-{os.geteuid()}-{namespace[:16]}"
    path = Path(options.path)
    if "\0" in options.path or not path.is_absolute() or options.path.endswith(("/", "..")):
        raise ConfigError(PATH_OPTION, options.path, "is to be the absolute path of a file")
    if not path.parent.is_dir():
        raise ConfigError(PATH_OPTION, options.path, "its folder does not exist")
    return path
