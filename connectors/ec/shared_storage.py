"""The EC connector over a folder that all stages see: a local disk, a tmpfs, NFS, a volume in Kubernetes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import msgspec

from connectors.ec.base import ECConnectorConfig, ECSide
from connectors.ec.folder_store import FolderStore
from connectors.ec.store_connector import ECStoreConnector, StoreOptions
from connectors.options import EC_EXTRA
from core.errors import ConfigError

log = logging.getLogger(__name__)

#: Without `capacity_bytes`: half of the file system, for it has other uses, and no more than this, some ten thousand
#: images of a large model. A folder that somebody forgets about must not fill a disk.
_DEFAULT_CAPACITY_BYTES = 32 << 30


class SharedStorageOptions(StoreOptions, frozen=True, kw_only=True):
    """The keys of the extra config. The same `capacity_bytes` and `ttl_s` are meant for all stages; where they differ,
    the smallest of the producers' decides what is removed."""

    shared_storage_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    #: Of the folder, all namespaces together. Absent: half of the file system, at most 32 GiB.
    capacity_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 60)] | None = None
    #: An item that was neither saved nor loaded for so long is gone. Absent: only the capacity makes items go.
    ttl_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e9)] | None = None


class ECSharedStorageConnector(ECStoreConnector):
    """One safetensors file an item."""

    options_type = SharedStorageOptions

    def open_store(self, options: SharedStorageOptions) -> FolderStore:
        root = _open_root(options.shared_storage_path, self.config)
        capacity_bytes = _capacity(root, options.capacity_bytes)
        if self.side is ECSide.WORKER and self.config.role.produces:
            log.info("the encoder cache's folder is kept to %d bytes", capacity_bytes)
        return FolderStore(
            root,
            self.config.namespace,
            capacity_bytes=capacity_bytes,
            ttl_s=options.ttl_s,
            # Consumers note down their loads. What they keep in their buffers is not loaded again, however often it is
            # asked for: only the producers' look-ups tell.
            renews=self.config.role.produces,
        )


def _open_root(text: str, config: ECConnectorConfig) -> Path:
    """The storage folder, made if its parent exists. Raises ConfigError where this role cannot work with it."""

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{EC_EXTRA} shared_storage_path", text, reason)

    try:
        root = Path(text).absolute()
        if not root.exists():
            root.mkdir(exist_ok=True)
        if not root.is_dir():
            raise refuse("is not a folder")
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be made or read: {getattr(error, 'strerror', None) or error}") from error
    if config.role.produces and not os.access(root, os.W_OK | os.X_OK):
        raise refuse(f"{config.role} must be able to write there")
    if config.role.consumes and not os.access(root, os.R_OK | os.X_OK):
        raise refuse(f"{config.role} must be able to read there")
    return root


def _capacity(root: Path, wanted: int | None) -> int:
    """Raises ConfigError for more than the file system has."""
    try:
        status = os.statvfs(root)
        size_bytes = status.f_blocks * status.f_frsize
    except OSError:
        size_bytes = 0
    if not size_bytes:  # some remote file systems do not say
        return wanted if wanted is not None else _DEFAULT_CAPACITY_BYTES
    if wanted is None:
        return min(_DEFAULT_CAPACITY_BYTES, size_bytes // 2)
    if wanted > size_bytes:
        raise ConfigError(f"{EC_EXTRA} capacity_bytes", wanted, f"the file system has {size_bytes} bytes in all")
    return wanted
