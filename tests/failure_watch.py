"""Over the whole run of the tests: nothing falls back in silence.

Every engine and every router that a test stops is asked first what it has counted. A failed load or save, a
recomputation, a preemption, a retry, a second encode of an item that a stage missed: each fails the test in whose time
the process ended, unless it was started as one that meets faults: by a test marked `faults`, or in `injected_faults`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import grpc
import pytest

import router.metrics
from cli.process import Child
from engine.stats import FAILURES
from protos import common_pb2, decode_pb2_grpc, encoder_pb2_grpc, prefill_pb2_grpc, router_pb2_grpc

#: What a router's begin with. One for each stage and reason: `encode`, `missing` is the second encode of an item.
_ROUTER_FAILURES = tuple(name.removesuffix("_total") for name in router.metrics.FAILURES)

_STUBS = {
    "services.encoder": encoder_pb2_grpc.EncoderStub,
    "services.prefill": prefill_pb2_grpc.PrefillStub,
    "services.decode": decode_pb2_grpc.DecodeStub,
    "router": router_pb2_grpc.RouterStub,
}
_TIMEOUT_S = 30.0

_num_declared = 0  # `injected_faults` around us


@contextlib.contextmanager
def injected_faults() -> Iterator[None]:
    """What is started in here, and perhaps again later, meets faults on purpose: what it counts is the test's own."""
    global _num_declared
    _num_declared += 1
    try:
        yield
    finally:
        _num_declared -= 1


def failures(counters: Mapping[str, int]) -> dict[str, int]:
    """Those of a worker's or a router's counters that must be zero and are not."""
    wrong = {name: counters[name] for name in FAILURES if counters.get(name)}
    return wrong | {name: count for name, count in counters.items() if name.startswith(_ROUTER_FAILURES) and count}


class FailureWatch:
    """A pytest plugin. It follows the classes through which tests start and stop whatever counts."""

    def __init__(self) -> None:
        self._item_declares = False
        self._exempt: WeakSet[object] = WeakSet()
        self._followed: set[str] = set()
        self._problems: list[str] = []

    def pytest_sessionstart(self) -> None:
        _wrap(Child, "start", before=self._began)
        _wrap(Child, "terminate", before=self._ask)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._item_declares = item.get_closest_marker("faults") is not None
        self._follow("engine.inproc_client", "InprocClient", "close", _inproc_counters)
        self._follow("engine.async_llm", "AsyncLLM", "shutdown", lambda llm: llm.stats.counters)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        result = yield
        problems, self._problems = self._problems, []
        if problems:
            pytest.fail("without an injected fault: " + "; ".join(problems), pytrace=False)
        return result

    def _follow(self, module: str, name: str, ends: str, counters: Callable[[Any], Mapping[str, int]]) -> None:
        """Modules that import torch are followed once a test has imported them: most tests need none."""
        if module in self._followed or module not in sys.modules:
            return
        self._followed.add(module)
        cls = getattr(sys.modules[module], name)
        _wrap(cls, "__init__", before=self._began)
        _wrap(cls, ends, before=lambda made: self._look_at(made, name, counters(made)))

    def _began(self, made: object) -> None:
        if self._item_declares or _num_declared:
            self._exempt.add(made)

    def _look_at(self, made: object, name: str, counters: Mapping[str, int]) -> None:
        if made not in self._exempt and (wrong := failures(counters)):
            self._problems.append(f"{name} counted {wrong}")

    def _ask(self, child: Child) -> None:
        """Before it is told to stop. One that was never ready, or that has ended, has nothing to say."""
        stub = next((_STUBS[word] for word in child.argv if word in _STUBS), None)
        if stub is None or child in self._exempt or not child.ready or child.process.poll() is not None:
            return
        try:
            with grpc.insecure_channel(child.grpc) as channel:
                load = stub(channel).GetLoad(common_pb2.GetLoadRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            if child.process.poll() is None:
                self._problems.append(f"{child.name} does not say what it counted: {error.code().name}")
            return
        self._look_at(child, child.name, load.counters)


def _inproc_counters(client: Any) -> Mapping[str, int]:
    made: Mapping[str, int] = client.stats().counters if hasattr(client, "core") else {}
    return made


def _wrap(cls: type, name: str, before: Callable[[Any], None]) -> None:
    """Have `before(self)` called whenever a method is."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        return method(self, *args, **kwargs)

    setattr(cls, name, wrapper)
