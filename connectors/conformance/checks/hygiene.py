"""Starting and ending: wrong options, `close` at any moment, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import DTYPES, FailedError, RefusedError, expect
from connectors.conformance.kit import Kit
from core.types import ECRole

_ROWS = 1024
_WIDE: dict[str, Any] = {"width": 1024, "dtype": "float32"}
_CYCLES = 4
#: Values that no option has a use for; whatever the option's type, most are wrong.
_WRONG: list[Any] = [None, -1, 1e308, "", "\0", [], {}, True, "nonsense"]


@check("hygiene/starts")
def _starts(kit: Kit) -> None:
    """Both sides start in each role with the configuration that was given."""
    for role in ECRole:
        engine = kit.engine(role)
        engine.settle()
        kit.close(engine)


@check("hygiene/wrong_options")
def _wrong_options(kit: Kit) -> None:
    """Options of any value raise ConfigError at the start, if anything."""
    with tempfile.TemporaryDirectory(prefix="triptych-kit-") as folder, contextlib.chdir(folder):
        names = sorted({*kit.factory.options(), *kit.extra(), "no_such_option"})
        for name in names:
            for value in _WRONG:
                _try_option(kit, name, value, names)


def _try_option(kit: Kit, name: str, value: Any, names: list[str]) -> None:
    try:
        engine = kit.engine(dtype="float32", extra={name: value})
    except RefusedError as error:
        named = any(each in str(error) for each in names)  # perhaps one that needs this one
        expect(named, f"ConfigError for {name}={value!r} names no option: {error}")
    except FailedError as error:
        raise FailedError(f"with {name}={value!r}: {error}") from error
    else:
        kit.close(engine)


@check("hygiene/unknown_dtype")
def _unknown_dtype(kit: Kit) -> None:
    """A dtype that the connector cannot store is refused at the start, by ConfigError."""
    for dtype in (torch.int64, torch.complex64):
        DTYPES["unknown"] = dtype  # of this process alone
        try:
            kit.engine(dtype="unknown", width=2)
        except RefusedError:
            continue


@check("hygiene/close_idle")
def _close_idle(kit: Kit) -> None:
    """Both sides close within two seconds, a second time too, and right after the start."""
    for used in (False, True):
        engine = kit.engine()
        if used:
            kit.must_fetch(engine, kit.key(1), kit.save(engine, kit.key(1)))
        kit.close(engine)


@check("hygiene/close_at_work")
def _close_at_work(kit: Kit) -> None:
    """Closed in the middle of look-ups, loads and saves both sides end within two seconds, and no thread goes on."""
    first = kit.engine(num_rows=4 * _ROWS, **_WIDE)
    embeds = kit.save(first, kit.key("there"), _ROWS)
    for n in range(6):
        engine = kit.engine(num_rows=4 * _ROWS, **_WIDE)
        for m in range(3):
            engine.ask(kit.key("absent", m))
            engine.start_save(kit.key(n, m), kit.item(engine, kit.key(n, m), _ROWS))
        engine.start_loads([(kit.key("there"), _ROWS)])
        time.sleep(kit.random.uniform(0.0, 0.02))
        kit.close(engine)
        for m in range(3):
            kit.may_fetch(first, kit.key(n, m), kit.item(first, kit.key(n, m), _ROWS))
    kit.must_fetch(first, kit.key("there"), embeds)
    kit.close(first)
    kit.eventually(lambda: not _threads(), f"threads go on after close: {', '.join(_threads())}", 3.0)


@check("hygiene/close_while_the_store_hangs")
def _close_slow(kit: Kit) -> None:
    """Both sides close within two seconds while the store hangs, and their threads end once it goes on."""
    engine = kit.engine()
    kit.save(engine, kit.key(1))
    with kit.slowed([kit.key(1), kit.key(2)]):
        engine.start_loads([(kit.key(1), 5)])
        engine.start_save(kit.key(2), kit.item(engine, kit.key(2)))
        engine.ask(kit.key(2))
        time.sleep(0.05)  # so that they are in the middle of it
        kit.close(engine)
    kit.eventually(lambda: not _threads(), f"threads go on after close: {', '.join(_threads())}")


@check("hygiene/nothing_left")
def _nothing_left(kit: Kit) -> None:
    """No thread, descriptor, shared memory, child process or temporary file is left, however often engines start."""
    with _own_temporary_folder():
        before: _Held | None = None
        for n in range(_CYCLES):
            producer, consumer = kit.engine(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
            kit.must_fetch(consumer, kit.key(n), kit.save(producer, kit.key(n)))
            expect(consumer.load(kit.key("never"), 5).reason, "an item was loaded which nobody saved")
            kit.close(producer)
            kit.close(consumer)
            kit.eventually(lambda: not _threads(), f"threads go on after close: {', '.join(_threads())}", 3.0)
            if before is None:
                before = _Held.now()  # what a library keeps for all that come after is there from the first time on
        deadline_s = time.monotonic() + 2.0
        while before is not None and (left := _Held.now().more_than(before)):
            expect(time.monotonic() < deadline_s, f"after {_CYCLES - 1} engines more were started and closed: {left}")
            time.sleep(0.05)


@check("hygiene/no_left_overs")
def _no_left_overs(kit: Kit) -> None:
    """Once all engines have closed they have left items in the store and nothing else."""
    before = set(kit.left_overs())  # of engines that other checks have killed
    producer, consumer = kit.engine(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
    for n in range(4):
        kit.must_fetch(consumer, kit.key(n), kit.save(producer, kit.key(n)))
        expect(consumer.load(kit.key("never"), 5).reason, "an item was loaded which nobody saved")
    kit.close(producer)
    kit.close(consumer)

    def theirs() -> list[str]:
        return sorted(set(kit.left_overs()) - before)

    kit.eventually(lambda: not theirs(), f"the store holds more than items: {theirs()[:4]}", 3.0)


@contextlib.contextmanager
def _own_temporary_folder() -> Iterator[None]:
    """For all of this process: in the usual one other programs come and go."""
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="triptych-kit-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            os.environ.pop("TMPDIR")
            if variable is not None:
                os.environ["TMPDIR"] = variable


class _Held(NamedTuple):
    """What this process holds of the system."""

    threads: int
    descriptors: int
    children: int
    shared_memory: frozenset[str]
    temporary: frozenset[str]

    @classmethod
    def now(cls) -> _Held:
        return cls(
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
            frozenset(os.listdir("/dev/shm")),  # noqa: S108 - looked at, not written to
            frozenset(os.listdir(tempfile.gettempdir())),
        )

    def more_than(self, before: _Held) -> str:
        """What there is more of, in words; "" for nothing."""
        found = []
        for name in ("threads", "descriptors", "children"):
            more = getattr(self, name) - getattr(before, name)
            if more > 0:
                found.append(f"{more} {name} more")
        for name in ("shared_memory", "temporary"):
            files = getattr(self, name) - getattr(before, name)
            if len(files) >= _CYCLES - 1:  # other programs come and go
                found.append(f"{name} {', '.join(sorted(files)[:3])}")
        return "; ".join(found)


def _threads() -> list[str]:
    """Those of connectors. (pyzmq has one of its own, for all that send without a copy; it stays.)"""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not type(thread).__module__.startswith("zmq.")
    ]
