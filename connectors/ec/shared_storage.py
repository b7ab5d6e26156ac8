"""The EC connector over a folder that all stages see: a local disk, a tmpfs, NFS, a volume in Kubernetes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from connectors.device_copy import DeviceCopies
from connectors.ec.base import (
    ECConnectorBase,
    ECConnectorConfig,
    ECConnectorOutput,
    ECLoad,
    ECSide,
)
from connectors.ec.item_file import DTYPES, ItemError
from connectors.ec.item_store import ItemStore
from connectors.ec.job_threads import JobThreads
from connectors.ec.lookup import LookupTable
from connectors.options import EC_EXTRA, parse_options
from core.errors import ConfigError

log = logging.getLogger(__name__)

#: No writer takes this long for one item; what is older was left behind.
_ABANDONED_AFTER_S = 600.0
#: Of the two seconds that `close` has, for all threads together.
_CLOSE_S = 1.8


class SharedStorageOptions(msgspec.Struct, frozen=True):
    """The keys of the extra config."""

    shared_storage_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2  # for loads and saves
    negative_ttl_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.05  # how long "not there" is believed


class ECSharedStorageConnector(ECConnectorBase):
    """One file an item. Scheduler side: one thread that looks items up. Worker side: `num_threads` that move bytes.

    Results are guarded by a lock, so the worker's methods may be called from any one thread at a time.
    """

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        super().__init__(config, side)
        options = parse_options(SharedStorageOptions, config.extra, EC_EXTRA)
        if config.dtype not in DTYPES:
            raise ConfigError("--dtype", str(config.dtype), "this connector stores float16, bfloat16 and float32")
        self._store = ItemStore(_open_root(options.shared_storage_path, config), config.namespace)
        self._lookups: LookupTable | None = None
        self._jobs: JobThreads | None = None
        self._closing = threading.Event()
        self._sweeper: threading.Thread | None = None
        self._lock = threading.Lock()
        self._output = ECConnectorOutput()
        if side is ECSide.SCHEDULER:
            # A consumer learns from a failed load that an item has gone. A producer never loads: were it to believe a
            # look-up for long, it would go on answering "cached" for an item that it is asked for because it vanished.
            positive_ttl_s = options.negative_ttl_s if config.role.produces else float("inf")
            self._lookups = LookupTable(
                self._probe, config.notify, positive_ttl_s=positive_ttl_s, negative_ttl_s=options.negative_ttl_s
            )
        else:
            self._jobs = JobThreads(options.num_threads, "ec-storage")
            if config.role.produces:
                self._sweeper = threading.Thread(target=self._sweep, name="ec-sweep", daemon=True)
                self._sweeper.start()

    # ---- scheduler side ----

    def has_cache_item(self, key: str) -> bool | None:
        return self._lookups.ask(key) if self._lookups is not None else None

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        if self._lookups is not None:
            for key in (*output.failed_loading, *output.finished_saving):
                self._lookups.forget(key)

    def _probe(self, keys: list[str]) -> list[bool]:
        return [self._store.contains(key) for key in keys]

    # ---- worker side ----

    def register_caches(self, buffer: torch.Tensor) -> None:
        super().register_caches(buffer)
        self._copies = DeviceCopies(buffer.device)

    def start_load_caches(self) -> None:
        if self._metadata is None or self._jobs is None:
            return
        now_s = time.monotonic()
        for load in self._metadata.loads:
            self._jobs.submit(partial(self._load, load, now_s))

    def save_caches(self, key: str, embeds: torch.Tensor) -> None:
        if self._jobs is not None:
            self._jobs.submit(partial(self._save, key, embeds, self._copies.mark(), time.monotonic()))

    def get_finished(self) -> ECConnectorOutput:
        with self._lock:
            output, self._output = self._output, ECConnectorOutput()
        return output

    def _load(self, load: ECLoad, ordered_s: float) -> None:
        reason = _reason_of(lambda: self._load_into_buffer(load))
        with self._lock:
            if reason is None:
                self._output.finished_loading.append(load.key)
                self._output.seconds_loading.append(time.monotonic() - ordered_s)
                self._output.bytes_loaded += load.where.num_rows * self.config.width * self.config.dtype.itemsize
            else:
                self._output.failed_loading[load.key] = reason
        self.config.notify()

    def _load_into_buffer(self, load: ECLoad) -> None:
        start, end = load.where.start, load.where.start + load.where.num_rows
        if not 0 <= start < end <= self._buffer.shape[0]:
            raise ItemError(f"rows {start} to {end} are not in the encoder buffer")
        target = self._buffer[start:end]  # [num_embeds, width]
        if self._copies.on_host:
            self._store.read(load.key, target)
            return
        host = self._copies.empty_host(target.shape, target.dtype)
        self._store.read(load.key, host)
        self._copies.to_device([(target, host)])

    def _save(self, key: str, embeds: torch.Tensor, after: torch.cuda.Event | None, ordered_s: float) -> None:
        reason = _reason_of(lambda: self._save_from_buffer(key, embeds, after))
        with self._lock:
            if reason is None:
                self._output.finished_saving.append(key)
                self._output.seconds_saving.append(time.monotonic() - ordered_s)
                self._output.bytes_saved += embeds.nbytes
            else:
                self._output.failed_saving[key] = reason
        self.config.notify()

    def _save_from_buffer(self, key: str, embeds: torch.Tensor, after: torch.cuda.Event | None) -> None:
        if embeds.dtype != self.config.dtype or embeds.shape[1:] != (self.config.width,):
            raise ItemError(f"embeddings are {embeds.dtype} {tuple(embeds.shape)}, which this namespace does not hold")
        host = embeds if self._copies.on_host else self._copies.to_host([embeds], after)[0]
        self._store.write(key, host.contiguous())

    def _sweep(self) -> None:
        removed = self._store.sweep(_ABANDONED_AFTER_S, self._closing.is_set)
        if removed:
            log.info("removed %d files that dead writers left in the encoder cache", removed)

    # ---- both ----

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        self._closing.set()
        for part in (self._lookups, self._jobs):
            if part is not None:
                part.close(max(0.0, deadline - time.monotonic()))
        if self._sweeper is not None:
            self._sweeper.join(max(0.0, deadline - time.monotonic()))


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


def _reason_of(job: Callable[[], None]) -> str | None:
    """Run `job`; None, or why it failed, without a path."""
    try:
        job()
    except ItemError as error:
        return str(error)
    except OSError as error:
        return f"storage: {error.strerror or type(error).__name__}"
    except Exception as error:  # whatever it is, the key must be reported: the engine waits for it
        log.exception("a load or save of the encoder cache failed")
        return f"{type(error).__name__}"
    return None
