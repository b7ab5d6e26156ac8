"""More connectors broken on purpose (see mutants.py): in what they do when, not in what they store."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from connectors.ec.base import ECConnectorConfig, ECConnectorOutput, ECSide
from connectors.ec.store import LoadTarget, SaveSource, StoreError
from core.errors import ConfigError
from examples.sqlite_connector import SqliteOptions, SqliteStore
from tests.connectors.mutants import Mutant

# ---- the scheduler side ----


class LooksOnCallersThread(Mutant):
    caught_by = ("look_ups/from_memory", "sqlite3")

    def has_cache_item(self, key: str) -> bool | None:
        return self._store.contains([key])[0]


class Waits(Mutant):
    caught_by = ("look_ups/quick", "has_cache_item")

    def has_cache_item(self, key: str) -> bool | None:
        answered = threading.Event()
        answered.wait(0.005)
        return super().has_cache_item(key)


class WaitsForTheStore(Mutant):
    caught_by = ("look_ups/quick_while_the_store_hangs", "has_cache_item")

    def has_cache_item(self, key: str) -> bool | None:
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.extend(self._look(key)))
        thread.start()
        thread.join()
        return answers[0]

    def _look(self, key: str) -> list[bool]:
        try:
            return self._store.contains([key])
        except StoreError:
            return [False]


class Lists(Mutant):
    caught_by = ("look_ups/list_nothing", "listdir")

    class Store(SqliteStore):
        def contains(self, keys: Sequence[str]) -> list[bool]:
            os.listdir(Path(self._options.path).parent)
            return super().contains(keys)


class SticksToItsNo(Mutant):
    caught_by = ("look_ups/saved_meanwhile", "says False")

    def ensure_cache_available(self, keys: Sequence[str]) -> bool:
        answers = [self.has_cache_item(key) for key in keys]
        return all(answers)


class NeverAnswers(Mutant):
    caught_by = ("round_trip/absent", "no answer")

    def has_cache_item(self, key: str) -> bool | None:
        return super().has_cache_item(key) or None


class BelievesInAnything(Mutant):
    caught_by = ("round_trip/absent", "nobody saved")

    def has_cache_item(self, key: str) -> bool | None:
        return True


# ---- reports ----


class ReportsTwice(Mutant):
    caught_by = ("ownership/reported_once", "second time")
    _last: ECConnectorOutput = ECConnectorOutput()

    def get_finished(self) -> ECConnectorOutput:
        output, self._last = self._last, super().get_finished()
        return ECConnectorOutput(
            finished_saving=output.finished_saving + self._last.finished_saving,
            seconds_saving=output.seconds_saving + self._last.seconds_saving,
            failed_loading=self._last.failed_loading,
            finished_loading=self._last.finished_loading,
            seconds_loading=self._last.seconds_loading,
        )


class ReportsNoFailures(Mutant):
    caught_by = ("round_trip/absent", "not reported")

    def get_finished(self) -> ECConnectorOutput:
        output = super().get_finished()
        output.failed_loading = {}
        return output


class GivesNoReasons(Mutant):
    caught_by = ("round_trip/absent", "without a reason")

    def get_finished(self) -> ECConnectorOutput:
        output = super().get_finished()
        output.failed_loading = dict.fromkeys(output.failed_loading, "")
        return output


class Raises(Mutant):
    caught_by = ("round_trip/absent", "get_finished raised KeyError")

    def get_finished(self) -> ECConnectorOutput:
        output = super().get_finished()
        if output.failed_loading:
            raise KeyError("where is it?")
        return output


class CountsFailures(Mutant):
    caught_by = ("round_trip/many_in_a_step", "without a fault")

    def take_counters(self) -> Mapping[str, int]:
        return {"lookup_failures": 1}


class SaysSavedAnyway(Mutant):
    caught_by = ("faults/full", "absent which was saved")

    class Store(SqliteStore):
        def write(self, key: str, source: SaveSource) -> None:
            with contextlib.suppress(StoreError):
                super().write(key, source)


class SaysLoadedAnyway(Mutant):
    caught_by = ("faults/gone_and_back", "wrong")

    class Store(SqliteStore):
        def read(self, key: str, target: LoadTarget) -> None:
            with contextlib.suppress(StoreError):
                super().read(key, target)


# ---- ownership and time ----


class Scribbles(Mutant):
    caught_by = ("ownership/late_load", "outside of a load")

    def _read(self, key: str, target: LoadTarget) -> None:
        try:
            super()._read(key, target)
        except Exception:  # whatever ended the load: the fault comes after it
            late = threading.Timer(0.1, target._bytes.__setitem__, (slice(None), b"\7" * target.num_bytes))
            late.start()  # whoever gave up first, the report is out by then
            raise


class PublishesLate(Mutant):
    caught_by = ("ownership/late_save", "wrong")

    class Store(SqliteStore):
        def write(self, key: str, source: SaveSource) -> None:
            db = sqlite3.connect(self._options.path, 5.0)
            db.execute("CREATE TABLE IF NOT EXISTS other (x)")  # waits while the database is locked
            db.close()
            super().write(key, SaveSource(source.embeds, lambda: False))


class ChangesWhatItSaves(Mutant):
    caught_by = ("ownership/saved_tensor_unchanged", "changed")

    class Store(SqliteStore):
        def write(self, key: str, source: SaveSource) -> None:
            super().write(key, source)
            source.embeds.zero_()


class HasNoLimit(Mutant):
    caught_by = ("faults/slow_loads", "not reported within")

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        super().__init__(msgspec.structs.replace(config, extra={**config.extra, "timeout_s": 60.0}), side)


class KeepsTheLockInLoads(Mutant):
    caught_by = ("interpreter_lock/saves_and_loads", "a load keeps")

    class Store(SqliteStore):
        def read(self, key: str, target: LoadTarget) -> None:
            super().read(key, target)
            bytes(target._bytes)


class KeepsTheLockInSaves(Mutant):
    caught_by = ("interpreter_lock/saves_and_loads", "a save keeps")

    class Store(SqliteStore):
        def write(self, key: str, source: SaveSource) -> None:
            bytes(source.data)
            super().write(key, source)


# ---- starting and ending ----


class NeedsTheStoreAtTheStart(Mutant):
    caught_by = ("faults/down_at_the_start", "does not start")

    def open_store(self, options: SqliteOptions) -> SqliteStore:
        try:
            SqliteStore(options, self.config.namespace).contains([])
        except StoreError as error:
            raise ConfigError("path", options.path, str(error)) from None
        return super().open_store(options)


class RaisesValueError(Mutant):
    caught_by = ("hygiene/wrong_options", "not ConfigError")

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        float(config.extra.get("timeout_s", 1.0))
        super().__init__(config, side)


class LeaksThread(Mutant):
    caught_by = ("hygiene/nothing_left", "threads go on")

    def open_store(self, options: SqliteOptions) -> SqliteStore:
        threading.Thread(target=threading.Event().wait, name="ec-left-behind", daemon=True).start()
        return super().open_store(options)


class LeaksDescriptor(Mutant):
    caught_by = ("hygiene/nothing_left", "descriptors more")

    def open_store(self, options: SqliteOptions) -> SqliteStore:
        os.open(os.devnull, os.O_RDONLY)
        return super().open_store(options)


class LeaksFiles(Mutant):
    caught_by = ("hygiene/nothing_left", "temporary")

    def open_store(self, options: SqliteOptions) -> SqliteStore:
        descriptor, _ = tempfile.mkstemp(prefix="triptych-mutant-")
        os.close(descriptor)
        return super().open_store(options)


class LeavesParts(Mutant):
    caught_by = ("hygiene/no_left_overs", "more than items")

    class Store(SqliteStore):
        def write(self, key: str, source: SaveSource) -> None:
            super().write(key, source)
            Path(f"{self._options.path}.{key}.tmp").touch()


class ClosesSlowly(HasNoLimit):
    caught_by = ("hygiene/close_while_the_store_hangs", "close of the")

    def close(self) -> None:
        if self._jobs is not None:
            self._jobs.close(6)
        super().close()


class ClosesOnce(Mutant):
    caught_by = ("hygiene/close_idle", "close raised")
    _closed = False

    def close(self) -> None:
        if self._closed:
            raise RuntimeError("closed already")
        self._closed = True
        super().close()


class Crashes(Mutant):
    caught_by = ("round_trip/absent", "SIGSEGV")

    class Store(SqliteStore):
        def read(self, key: str, target: LoadTarget) -> None:
            os.kill(os.getpid(), signal.SIGSEGV)


class Hangs(Mutant):
    caught_by = ("round_trip/saved_again", "hung")

    def get_finished(self) -> ECConnectorOutput:
        threading.Event().wait()
        raise AssertionError
