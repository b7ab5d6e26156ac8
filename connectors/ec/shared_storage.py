"""The EC connector over a folder that all stages see: a local disk, a tmpfs, NFS, a volume in Kubernetes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from connectors.ec.base import ECConnectorConfig
from connectors.ec.folder_store import FolderStore
from connectors.ec.store_connector import ECStoreConnector, StoreOptions
from connectors.options import EC_EXTRA
from core.errors import ConfigError


class SharedStorageOptions(StoreOptions, frozen=True, kw_only=True):
    """The keys of the extra config."""

    shared_storage_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class ECSharedStorageConnector(ECStoreConnector):
    """One safetensors file an item."""

    options_type = SharedStorageOptions

    def open_store(self, options: SharedStorageOptions) -> FolderStore:
        return FolderStore(_open_root(options.shared_storage_path, self.config), self.config.namespace)


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
