"""A plugin written for vLLM's ECConnectorBase, ported: docs/connectors.md has the plugin as it was.

It keeps raw files in a folder. Its workers tell the scheduler what they have saved, which then knows without looking.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from connectors.ec.base import ECConnectorConfig, ECConnectorOutput, ECSide
from connectors.ec.store import CHUNK_BYTES, ECStore, ItemError, LoadTarget, SaveSource
from connectors.ec.store_connector import ECStoreConnector, StoreOptions

_MAX_KNOWN = 100_000


class FileOptions(StoreOptions, frozen=True, kw_only=True):
    """The keys of --ec-connector-extra-config."""

    folder: Annotated[str, msgspec.Meta(min_length=1)]


class ECFileConnector(ECStoreConnector):
    """One file an item."""

    options_type = FileOptions

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        super().__init__(config, side)
        self._known: OrderedDict[str, None] = OrderedDict()  # scheduler side: saved by our own worker

    def open_store(self, options: FileOptions) -> FileStore:
        return FileStore(Path(options.folder), self.config.namespace)

    def has_cache_item(self, key: str) -> bool | None:
        # An item that vanished is reported by those who miss it, as a failed load: below it is forgotten.
        return True if key in self._known else super().has_cache_item(key)

    def get_finished(self) -> ECConnectorOutput:
        """What was `build_connector_worker_meta`: a message to the scheduler side, beside the reports."""
        output = super().get_finished()
        if output.finished_saving:
            output.worker_metadata = msgspec.msgpack.encode(output.finished_saving)
        return output

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        super().update_connector_output(output)
        if output.worker_metadata:
            self._known.update(dict.fromkeys(msgspec.msgpack.decode(output.worker_metadata, type=list[str])))
        for key in output.failed_loading:
            self._known.pop(key, None)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


class FileStore(ECStore):
    """`<folder>/<namespace>-<key>`: 16 bytes of checksum, then the payload."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self._folder = folder
        self._namespace = namespace

    def contains(self, keys: Sequence[str]) -> list[bool]:
        os.stat(self._folder)  # a folder that has gone is a store that is down, not one that is empty
        return [self._path(key).exists() for key in keys]

    def read(self, key: str, target: LoadTarget) -> None:
        """In pieces, into the buffer: to give the memory of a whole item back takes milliseconds, in which no other
        thread runs."""
        try:
            with self._path(key).open("rb", buffering=0) as file:
                is_whole = os.fstat(file.fileno()).st_size == 16 + target.num_bytes
                stored = file.read(16)
                checksum = self._checksum(key, target.shape, str(target.dtype))
                for offset in range(0, target.num_bytes if is_whole else 0, CHUNK_BYTES):
                    size = min(CHUNK_BYTES, target.num_bytes - offset)
                    checksum.update(target.fill(offset, size, partial(_read_into, file)))
        except FileNotFoundError:
            raise ItemError("item is not in the store") from None
        if not is_whole or stored != checksum.digest():
            with contextlib.suppress(OSError):
                self._path(key).unlink()
            raise ItemError("the item is damaged, or not the one that is wanted", damaged=True)

    def write(self, key: str, source: SaveSource) -> None:
        checksum = self._checksum(key, source.embeds.shape, str(source.embeds.dtype))
        checksum.update(source.data)
        aside = self._path(key).with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            with aside.open("wb") as file:
                file.write(checksum.digest())
                file.write(source.data)
            source.check()
            aside.rename(self._path(key))  # visible whole or not at all
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._namespace}-{key}"

    def _checksum(self, key: str, shape: Sequence[int], dtype: str) -> xxhash.xxh3_128:
        """Of what the item is; its bytes are still to be added."""
        return xxhash.xxh3_128(f"1 {self._namespace} {key} {list(shape)} {dtype}".encode())


def _read_into(file: FileIO, piece: memoryview) -> None:
    file.readinto(piece)  # a short read shows in the checksum
