"""Both sides of a connector, driven as an engine drives them, with its rules checked at every call.

an exception out of any call, an answer of a wrong type                     the check fails
a report for a key that was not ordered, a second one, one without a reason     〃
a byte of the buffer written outside of the slices of loads under way           〃
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from connectors.conformance.ends import PAINT, FailedError, RefusedError, expect
from connectors.conformance.factory import ConnectorFactory
from connectors.ec.base import (
    EC_COUNTERS,
    MAX_SOURCE_CHARS,
    BufferSlice,
    ECConnectorBase,
    ECConnectorConfig,
    ECConnectorOutput,
    ECItem,
    ECSide,
)
from core.errors import ConfigError
from core.types import ECRole

#: A connector that never calls `notify` is seen this often.
_POLL_S = 0.002
_CLOSE_LIMIT_S = 2.0
#: What a machine under load may add to any limit.
SLACK_S = 3.0


class Setup(msgspec.Struct, frozen=True):
    """What one engine is made with. `limit_s`: the time within which each order is to be reported."""

    role: ECRole
    namespace: str
    dtype: str
    width: int
    num_rows: int
    extra: dict[str, Any]
    limit_s: float


class Loaded(NamedTuple):
    """How a load ended: the item, or why there is none."""

    embeds: torch.Tensor | None
    reason: str


class Engine:
    """One engine's connector. Used by one thread."""

    def __init__(self, factory: ConnectorFactory, setup: Setup, dtype: torch.dtype, sources: dict[str, str]) -> None:
        self.setup = setup
        self.sources = sources  # by key; shared by the engines of one check, as the router carries them
        self.counters: dict[str, int] = {}
        self.slowest_scheduler_call_s = 0.0
        self._rung = threading.Event()
        self._saving: dict[str, torch.Tensor] = {}
        self._loading: dict[str, BufferSlice] = {}
        self._saved: dict[str, str] = {}  # ended and not yet asked for: the reason, or ""
        self._loaded: dict[str, Loaded] = {}
        self._next_row = 1
        self._sides: list[ECConnectorBase] = []
        config = ECConnectorConfig(setup.role, setup.namespace, dtype, setup.width, setup.extra, self._rung.set)
        try:
            for side in ECSide:
                self._sides.append(self._make(factory, config, side))
            self.scheduler, self.worker = self._sides
            self.buffer = torch.empty(setup.num_rows, setup.width, dtype=dtype)
            self._bytes = self.buffer.view(torch.uint8)
            self._bytes.fill_(PAINT)
            self.call(self.worker.register_caches, self.buffer)
            handshake = self.call(self.worker.handshake)
            expect(isinstance(handshake, str), f"handshake returned {type(handshake).__name__}")
            self.call(self.scheduler.set_handshake, handshake)
        except BaseException:
            for made in self._sides:
                made.close()
            raise

    def _make(self, factory: ConnectorFactory, config: ECConnectorConfig, side: ECSide) -> ECConnectorBase:
        try:
            return factory.make(config, side)
        except ConfigError as error:
            raise RefusedError(str(error)) from None
        except Exception as error:
            raise FailedError(f"the constructor raised {_short(error)}, not ConfigError") from error

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of either side. Raises FailedError where it raises anything."""
        try:
            return method(*args)
        except FailedError:
            raise
        except Exception as error:
            raise FailedError(f"{getattr(method, '__name__', method)} raised {_short(error)}") from error

    # ---- whole errands ----

    def look_up(self, key: str) -> bool:
        """Ask until there is an answer, as for a request that has just come."""
        self._tell_source(key)
        self.call(self.scheduler.ensure_cache_available, [key])
        deadline_s = time.monotonic() + self.setup.limit_s + SLACK_S
        while (answer := self.ask(key)) is None:
            expect(time.monotonic() < deadline_s, f"has_cache_item had no answer after {self.setup.limit_s + SLACK_S}s")
            self.wait()
        return answer

    def save(self, key: str, embeds: torch.Tensor) -> str:
        """Why it failed, or ""."""
        self.start_save(key, embeds)
        return self.saved(key)

    def load(self, key: str, num_rows: int) -> Loaded:
        """Order a load, whatever a look-up says, and wait for its end."""
        self.start_loads([(key, num_rows)])
        return self.loaded(key)

    def fetch(self, key: str, num_rows: int) -> Loaded:
        """Load the item if a look-up says that it is there."""
        if not self.look_up(key):
            return Loaded(None, "absent")
        return self.load(key, num_rows)

    # ---- single steps ----

    def ask(self, key: str) -> bool | None:
        """`has_cache_item`, once."""
        self._tell_source(key)
        begin_s = time.perf_counter()
        answer = self.call(self.scheduler.has_cache_item, key)
        self.slowest_scheduler_call_s = max(self.slowest_scheduler_call_s, time.perf_counter() - begin_s)
        if answer is not None and not isinstance(answer, bool):
            raise FailedError(f"has_cache_item returned {type(answer).__name__}, not True, False or None")
        return answer

    def start_save(self, key: str, embeds: torch.Tensor) -> None:
        """Begin; `embeds` is not to be written to before `saved` returns."""
        self._saving[key] = embeds
        self.call(self.worker.save_caches, key, embeds)

    def start_loads(self, items: Iterable[tuple[str, int]]) -> None:
        """One step with these loads, a row that must stay as it is before and after each."""
        for key, num_rows in items:
            where = BufferSlice(self._next_row, num_rows)
            self._next_row += num_rows + 1
            if self._next_row > self.setup.num_rows:
                raise ValueError("the check wants a larger buffer")
            self._tell_source(key)
            self._loading[key] = where
            self.call(self.scheduler.update_state_after_alloc, ECItem(key, num_rows), where)
        metadata = self.call(self.scheduler.build_connector_meta)
        self.call(self.worker.bind_connector_metadata, metadata)
        self.call(self.worker.start_load_caches)
        self.call(self.worker.clear_connector_metadata)

    def has_saved(self, key: str) -> bool:
        """Whether the end of a save has been reported; `saved` then has it."""
        return key in self._saved

    def saved(self, key: str, *, limit_s: float | None = None) -> str:
        """Wait for the end of a save: why it failed, or ""."""
        self._wait_until(lambda: key in self._saved, f"the save of {key:.8}…", limit_s)
        return self._saved.pop(key)

    def loaded(self, key: str, *, limit_s: float | None = None) -> Loaded:
        """Wait for the end of a load. The slice is painted over once it was looked at."""
        self._wait_until(lambda: key in self._loaded, f"the load of {key:.8}…", limit_s)
        return self._loaded.pop(key)

    def wait(self, seconds: float = _POLL_S) -> None:
        """Until `notify` is called, or a moment is over."""
        self._rung.wait(seconds)
        self._rung.clear()

    def poll(self) -> ECConnectorOutput:
        """`get_finished` and what an engine does with it; checks all of it."""
        output = self.call(self.worker.get_finished)
        if not isinstance(output, ECConnectorOutput):
            raise FailedError(f"get_finished returned {type(output).__name__}, not ECConnectorOutput")
        output.counters = self._count(self.worker)
        try:  # the two sides of an engine may be in two processes
            msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=ECConnectorOutput)
        except (TypeError, msgspec.MsgspecError) as error:
            raise FailedError(f"what get_finished returned cannot be sent: {error}") from None
        expect(len(output.seconds_saving) == len(output.finished_saving), "seconds_saving: not one value per item")
        expect(len(output.seconds_loading) == len(output.finished_loading), "seconds_loading: not one value per item")
        for key in output.finished_saving:
            self._end_save(key, "")
        for key in output.finished_loading:
            self._end_load(key, "")
        for ends, failed in ((self._end_save, output.failed_saving), (self._end_load, output.failed_loading)):
            for key, reason in failed.items():
                expect(isinstance(reason, str) and reason, f"failure of {key:.8}… is reported without a reason")
                ends(key, reason)
        self.call(self.scheduler.update_connector_output, output)
        for key in output.finished_saving:
            source = self.call(self.scheduler.item_source, key)
            good = isinstance(source, str) and len(source) <= MAX_SOURCE_CHARS and (not source or source.isprintable())
            expect(good, f"item_source is to be at most {MAX_SOURCE_CHARS} printable characters")
            self.sources[key] = source
        self._count(self.scheduler)
        return output

    def check_buffer(self) -> None:
        """Nothing but slices of loads under way was written to."""
        clean = torch.ones(self.setup.num_rows, dtype=torch.bool)
        for where in self._loading.values():
            clean[where.start : where.start + where.num_rows] = False
        for begin in range(0, self.setup.num_rows, 1 << 14):  # in parts: the comparison makes a copy
            part, mask = self._bytes[begin : begin + (1 << 14)], clean[begin : begin + (1 << 14)]
            expect(bool(((part == PAINT).all(dim=1) | ~mask).all()), "the buffer was written to outside of a load")

    def settle(self, seconds: float = 0.05) -> None:
        """Wait for reports and writes that must not come."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.wait(0.01)
            self.poll()
        self.check_buffer()

    def close(self) -> None:
        """Both sides, twice. A close that waits too long fails the check."""
        for side in self._sides:
            begin_s = time.monotonic()
            self.call(side.close)
            seconds = time.monotonic() - begin_s
            expect(seconds < _CLOSE_LIMIT_S + SLACK_S, f"close of the {side.side} side took {seconds:.1f} s")
            self.call(side.close)

    # ---- inside ----

    def _tell_source(self, key: str) -> None:
        if source := self.sources.get(key):
            self.call(self.scheduler.add_item_source, key, source)

    def _wait_until(self, condition: Callable[[], bool], what: str, limit_s: float | None) -> None:
        limit_s = (self.setup.limit_s if limit_s is None else limit_s) + SLACK_S
        deadline_s = time.monotonic() + limit_s
        while not condition():
            self.poll()
            if condition():
                return
            expect(time.monotonic() < deadline_s, f"{what} was not reported within {limit_s:g} s")
            self.wait()

    def _end_save(self, key: str, reason: str) -> None:
        expect(key in self._saving, f"save of {key:.8}… reported, which is not under way (or a second time)")
        del self._saving[key]
        self._saved[key] = reason

    def _end_load(self, key: str, reason: str) -> None:
        expect(key in self._loading, f"load of {key:.8}… reported, which is not under way (or a second time)")
        where = self._loading.pop(key)
        rows = slice(where.start, where.start + where.num_rows)
        self._loaded[key] = Loaded(None if reason else self.buffer[rows].clone(), reason)
        self._bytes[rows] = PAINT  # somebody else's from here on
        if not self._loading:
            self._next_row = 1

    def _count(self, side: ECConnectorBase) -> dict[str, int]:
        counters: Mapping[str, int] = self.call(side.take_counters)
        for name, by in counters.items():
            expect(name in EC_COUNTERS, f"take_counters names {name!r}, which is not in EC_COUNTERS")
            expect(isinstance(by, int) and by >= 0, f"take_counters has {name}={by!r}")
            self.counters[name] = self.counters.get(name, 0) + by
        return {name: by for name, by in counters.items() if by}


def count_down(items: Sequence[Any], seconds: float) -> Iterable[Any]:
    """The items round and round for `seconds`, each at least once."""
    end_s = time.monotonic() + seconds
    while True:
        yield from items
        if time.monotonic() >= end_s:
            return


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
