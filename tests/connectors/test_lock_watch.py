"""The watch sees who keeps the interpreter's lock, and not who works without it."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from connectors.conformance.lock_watch import LockWatch
from core.interpreter import SWITCH_INTERVAL_S, share_lock_often

_NAP_S = 0.02
#: Until it went well once: on a busy machine who holds the lock may wait for a processor with it.
_MAX_ROUNDS = 200


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


def longest_s(work: Callable[[], object]) -> float:
    thread = threading.Thread(target=work)
    with LockWatch() as watch:
        thread.start()
        thread.join()
    return watch.longest_s


def test_a_call_that_keeps_the_lock_is_seen() -> None:
    keeps = ctypes.PyDLL(None).usleep
    assert longest_s(lambda: keeps(int(_NAP_S * 1e6))) > 0.9 * _NAP_S


def test_a_call_that_lets_go_of_it_is_not() -> None:
    lets_go = ctypes.CDLL(None).usleep
    assert any(longest_s(lambda: lets_go(int(_NAP_S * 1e6))) < 0.5 * _NAP_S for _ in range(_MAX_ROUNDS))


def test_python_code_lets_go_of_it_when_told_to() -> None:
    """By default it keeps the lock for five milliseconds."""

    def count() -> None:
        for _ in range(400_000):
            pass

    share_lock_often()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    assert any(longest_s(count) < 0.004 for _ in range(_MAX_ROUNDS))
