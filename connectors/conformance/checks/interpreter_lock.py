"""The interpreter's lock is kept by nobody for long: while it is, the engine's steps stand still."""

from __future__ import annotations

from collections.abc import Callable

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import expect
from connectors.conformance.engine import Loaded
from connectors.conformance.kit import Kit
from connectors.conformance.lock_watch import LockWatch
from core.interpreter import share_lock_often

#: The rule says one millisecond. What is beyond may be a thread that waited for a processor with the lock in its hands.
_LIMIT_S = 0.002
#: As many as a busy machine may need for one in which nobody was interrupted; the first good one is the last.
_ROUNDS = 30
_ROWS, _WIDTH = 8192, 2048  # of float32: 64 MB, so that to copy all of it takes more than that on any machine


@check("interpreter_lock/saves_and_loads", limit_s=120)
def _saves_and_loads(kit: Kit) -> None:
    """No thread keeps the interpreter's lock for a millisecond while an item of 64 MB is saved or loaded."""
    share_lock_often()  # as an engine does; this process is the check's alone
    engine = kit.engine(num_rows=_ROWS + 2, width=_WIDTH, dtype="float32")
    embeds = kit.item(engine, kit.key(0), _ROWS)
    # The first save and load import modules and make connections, and are not looked at.
    kit.must_fetch(engine, kit.key(0), kit.save(engine, kit.key(0), _ROWS))
    keys = map(kit.key, range(1, 1 + _ROUNDS))
    _briefly("a save", lambda: Loaded(None, engine.save(next(keys), embeds)))
    _briefly("a load", lambda: engine.load(kit.key(0), _ROWS))


def _briefly(what: str, work: Callable[[], Loaded]) -> None:
    """Until it went well once."""
    holds_s = []
    for _ in range(_ROUNDS):
        with LockWatch() as watch:
            ended = work()
        expect(not ended.reason, f"{what} of an item of 64 MB failed: {ended.reason}")
        del ended  # here: to give so much memory back takes a millisecond too, and is not the connector's doing
        if watch.longest_s < _LIMIT_S:
            return
        holds_s.append(watch.longest_s)
    expect(False, f"{what} keeps the interpreter's lock for {min(holds_s) * 1000:.1f} ms or more, each time")
