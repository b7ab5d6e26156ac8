"""A connector that is wrong on purpose: it delivers another picture's embeddings, as a file says. Everything else about
them is right, so only answers can tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec

from connectors.ec.folder_store import FolderStore
from connectors.ec.shared_storage import ECSharedStorageConnector, SharedStorageOptions
from connectors.ec.store import LoadTarget


class SwappingOptions(SharedStorageOptions, frozen=True, kw_only=True):
    swaps_path: Annotated[str, msgspec.Meta(min_length=1)]  # JSON: key -> the key whose item is delivered


class SwappingConnector(ECSharedStorageConnector):
    options_type = SwappingOptions

    def open_store(self, options: SwappingOptions) -> FolderStore:
        store = super().open_store(options)
        read = store.read

        def read_another(key: str, target: LoadTarget) -> None:
            swaps: dict[str, str] = json.loads(Path(options.swaps_path).read_text())
            read(swaps.get(key, key), target)

        store.read = read_another  # type: ignore[method-assign]
        return store
