"""The chassis of every connector of ours that has a store: threads, time limits, circuit breaker, buffer, reports.

A subclass names its options and opens its `ECStore`; docs/connectors.md builds one over SQLite.

    scheduler side   `has_cache_item` answers from a `LookupTable`, whose one thread asks the store, many keys at a time
    worker side      `num_threads` threads read and write; each order is reported within `timeout_s`, come what may

While a side's circuit breaker is open it does not touch the store: look-ups answer "no", loads and saves fail at once.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import torch

from connectors.breaker import CircuitBreaker
from connectors.device_copy import DeviceCopies
from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECConnectorOutput, ECLoad, ECSide
from connectors.ec.job_threads import Job, JobThreads
from connectors.ec.lookup import LookupTable
from connectors.ec.store import (
    AbandonedError,
    ECStore,
    ItemError,
    LoadTarget,
    SaveSource,
    StoreError,
    bytes_of,
    is_digest,
)
from connectors.options import EC_EXTRA, parse_options
from core.errors import ConfigError

log = logging.getLogger(__name__)

#: Of the two seconds that `close` has, for all threads together.
_CLOSE_S = 1.8
_CIRCUIT_OPEN = "the store does not answer; it is left alone for a moment"


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the extra config that every such connector has."""

    num_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2  # for loads and saves
    timeout_s: Annotated[float, msgspec.Meta(ge=0.05, le=600)] = 10.0  # from order to report
    negative_ttl_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.05  # how long "not there" is believed
    breaker_failures: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3  # in a row, until the store is left alone
    breaker_cooldown_s: Annotated[float, msgspec.Meta(ge=0.01, le=600)] = 1.0  # … for so long


class ECStoreConnector(ECConnectorBase):
    """Base of connectors with a store. Results are guarded by a lock, so the worker's methods may be called from any
    one thread at a time."""

    options_type: ClassVar[type[StoreOptions]] = StoreOptions
    #: What the store can hold; another dtype is refused at the start.
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(
        {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
    )

    #: Whether the scheduler side answers from look-ups in the store; a subclass that knows better sets it to False.
    looks_up: ClassVar[bool] = True

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        super().__init__(config, side)
        options = self.options = parse_options(self.options_type, config.extra, EC_EXTRA)
        if config.dtype not in self.dtypes:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
            raise ConfigError("--dtype", str(config.dtype).removeprefix("torch."), f"this connector stores {known}")
        if not is_digest(config.namespace):
            raise ConfigError("namespace", config.namespace, "is to have 64 hexadecimal digits")
        self._breaker = CircuitBreaker(options.breaker_failures, options.breaker_cooldown_s)
        self._lookups: LookupTable | None = None
        self._jobs: JobThreads | None = None
        self._maintenance: threading.Thread | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._output = ECConnectorOutput()
        self._lookup_failures = 0
        self._store = self.open_store(options)
        if side is ECSide.SCHEDULER and self.looks_up:
            # A consumer learns from a failed load that an item has gone. A producer never loads: were it to believe a
            # look-up for long, it would go on answering "cached" for an item that it is asked for because it vanished.
            positive_ttl_s = options.negative_ttl_s if config.role.produces else float("inf")
            self._lookups = LookupTable(
                self._probe,
                config.notify,
                positive_ttl_s=positive_ttl_s,
                negative_ttl_s=options.negative_ttl_s,
                timeout_s=options.timeout_s,
                on_timeout=self._lookup_hangs,
            )
        if side is ECSide.WORKER:
            self._jobs = JobThreads(options.num_threads, options.timeout_s, "ec-jobs")
            if config.role.produces:
                self._maintenance = threading.Thread(target=self._maintain, name="ec-maintain", daemon=True)
                self._maintenance.start()

    @abstractmethod
    def open_store(self, options: Any) -> ECStore:
        """The store of this side, from the checked `options_type`. Called once, by the constructor; `config` and `side`
        are set. Must not fail because the store is down: only because an option is wrong. Raises ConfigError."""

    # ---- scheduler side ----

    def has_cache_item(self, key: str) -> bool | None:
        if self._lookups is None or not is_digest(key) or self._breaker.is_open:
            return False
        return self._lookups.ask(key)

    def ensure_cache_available(self, keys: Sequence[str]) -> bool:
        if self._lookups is not None:
            for key in keys:
                self._lookups.doubt(key)
        return super().ensure_cache_available(keys)

    def add_item_source(self, key: str, source: str) -> None:
        if is_digest(key):
            self._store.add_item_source(key, source)

    def item_source(self, key: str) -> str:
        return self._store.item_source(key)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        if self._lookups is not None:
            for key in (*output.failed_loading, *output.finished_saving):
                self._lookups.forget(key)

    def _probe(self, keys: list[str]) -> list[bool]:
        if not self._breaker.allow():
            return [False] * len(keys)
        try:
            found = self._store.contains(keys)
        except (StoreError, OSError) as error:
            self._breaker.failed()
            self._lookup_failures += 1
            log.warning("a look-up in the encoder cache failed: %s", _reason_of(error))
            return [False] * len(keys)
        self._breaker.succeeded()
        return found

    def _lookup_hangs(self) -> None:
        self._breaker.failed()
        self._lookup_failures += 1

    # ---- worker side ----

    def register_caches(self, buffer: torch.Tensor) -> None:
        super().register_caches(buffer)
        self._copies = DeviceCopies(buffer.device)
        self._data = bytes_of(buffer) if self._copies.on_host else None

    def start_load_caches(self) -> None:
        if self._metadata is None or self._jobs is None:
            return
        now_s = time.monotonic()
        for load in self._metadata.loads:
            self._start_load(self._jobs, load, now_s)

    def save_caches(self, key: str, embeds: torch.Tensor) -> None:
        if self._jobs is None:
            return
        if not is_digest(key):
            self._report_save(key, "not an item's key")
            return
        after, ordered_s = self._copies.mark(), time.monotonic()

        def run(job: Job) -> None:
            reason = self._attempt(lambda: self._write(key, embeds, after, job))
            if job.finish():
                self._report_save(key, reason, embeds.nbytes, time.monotonic() - ordered_s)

        def expired(_job: Job) -> None:
            self._breaker.failed()
            self._report_save(key, self._too_slow())

        self._jobs.submit(Job(run, expired))

    def get_finished(self) -> ECConnectorOutput:
        with self._lock:
            output, self._output = self._output, ECConnectorOutput()
        return output

    def _start_load(self, jobs: JobThreads, load: ECLoad, ordered_s: float) -> None:
        start, end = load.where.start, load.where.start + load.where.num_rows
        if not is_digest(load.key):
            self._report_load(load.key, "not an item's key")
            return
        if not 0 <= start < end <= self._buffer.shape[0]:
            self._report_load(load.key, f"rows {start} to {end} are not in the encoder buffer")
            return
        self._load(jobs, load.key, self._buffer[start:end], ordered_s)

    def _load(self, jobs: JobThreads, key: str, slice_: torch.Tensor, ordered_s: float) -> None:
        """Begin to load an item into `slice_`, `[num_embeds, width]`, of the buffer."""
        target: LoadTarget | None = None

        def run(job: Job) -> None:
            nonlocal target
            data = None
            if self._data is not None:
                begin = slice_.data_ptr() - self._buffer.data_ptr()
                data = self._data[begin : begin + slice_.nbytes]
            made = target = LoadTarget(slice_, self._copies, data, self.config.is_crowded)
            if job.is_over:
                return
            reason = self._attempt(lambda: self._read(key, made))
            if job.finish():
                self._report_load(key, reason, slice_.nbytes, time.monotonic() - ordered_s)

        def expired(_job: Job) -> None:
            if target is not None:
                target.abandon()
            self._breaker.failed()
            self._report_load(key, self._too_slow())

        jobs.submit(Job(run, expired))

    def _read(self, key: str, target: LoadTarget) -> None:
        self._store.read(key, target)
        target.commit()

    def _write(self, key: str, embeds: torch.Tensor, after: torch.cuda.Event | None, job: Job) -> None:
        if embeds.dtype != self.config.dtype or embeds.shape[1:] != (self.config.width,):
            raise ItemError(f"embeddings are {embeds.dtype} {tuple(embeds.shape)}, which this namespace does not hold")
        host = embeds if self._copies.on_host else self._copies.to_host([embeds], after)[0]
        self._store.write(key, SaveSource(host.contiguous(), lambda: job.is_over))

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Run `work` unless the breaker is open; None, or why it failed."""
        if not self._breaker.allow():
            return _CIRCUIT_OPEN
        try:
            work()
        except AbandonedError:
            return self._too_slow()  # nobody will read it: the report was made when the limit was reached
        except ItemError as error:
            self._breaker.succeeded()
            return str(error)
        except (StoreError, OSError) as error:
            self._breaker.failed()
            return _reason_of(error)
        except Exception as error:  # whatever it is, the key must be reported: the engine waits for it
            self._breaker.failed()
            log.exception("a load or save of the encoder cache failed")
            return type(error).__name__
        self._breaker.succeeded()
        return None

    def _too_slow(self) -> str:
        return f"the store took longer than timeout_s={self.options.timeout_s:g}"

    def _report_load(self, key: str, reason: str | None, num_bytes: int = 0, seconds: float = 0.0) -> None:
        with self._lock:
            if reason is None:
                self._output.finished_loading.append(key)
                self._output.seconds_loading.append(seconds)
                self._output.bytes_loaded += num_bytes
            else:
                self._output.failed_loading[key] = reason
        self.config.notify()

    def _report_save(self, key: str, reason: str | None, num_bytes: int = 0, seconds: float = 0.0) -> None:
        with self._lock:
            if reason is None:
                self._output.finished_saving.append(key)
                self._output.seconds_saving.append(seconds)
                self._output.bytes_saved += num_bytes
            else:
                self._output.failed_saving[key] = reason
        self.config.notify()

    def _maintain(self) -> None:
        try:
            self._store.maintain(self._closing)
        except Exception:  # a stranger's store, whose loads and saves go on
            log.exception("the upkeep of the encoder cache ended early")

    # ---- both ----

    def take_counters(self) -> Mapping[str, int]:
        lookup_failures, self._lookup_failures = self._lookup_failures, 0
        ours = {"lookup_failures": lookup_failures, "breaker_opens": self._breaker.take_opens()}
        return {**ours, **self._store.take_counters()}

    def close(self) -> None:
        if self._closing.is_set():
            return
        deadline_s = time.monotonic() + _CLOSE_S
        self._closing.set()
        self._store.close()
        for part in (self._lookups, self._jobs):
            if part is not None:
                part.close(max(0.0, deadline_s - time.monotonic()))
        if self._maintenance is not None:
            self._maintenance.join(max(0.0, deadline_s - time.monotonic()))


def _reason_of(error: Exception) -> str:
    """Fit for a log and for a client: no path."""
    if isinstance(error, OSError):
        return f"storage: {error.strerror or type(error).__name__}"
    return str(error)
