"""The scheduler side answers from memory: no I/O on the thread that calls it, no listing of the store, no waiting."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import expect
from connectors.conformance.kit import Kit
from connectors.conformance.tracing import CallTrace, ListingTrace
from connectors.ec.base import BufferSlice, ECConnectorOutput, ECItem
from core.types import ECRole

#: For all the work of one call, on a machine that does other things besides.
_MEDIAN_S = 0.002
_WORST_S = 0.25
#: Of a few hundred calls; so often a whole machine may have paused.
_MAX_LONG = 4
_SOURCES = ["", "x", "{", "[]", "null", "{}", "127.0.0.1:1", "[::1]:99999", "a" * 1024, "a" * 5000, "../../etc/passwd"]
_NOT_ASCII = ["\0", "\N{PILE OF POO}" * 50, "tcp://127.0.0.1:0 ", "\r\nSHUTDOWN\r\n"]


@check("look_ups/from_memory")
def _from_memory(kit: Kit) -> None:
    """No method of the scheduler side touches files, sockets or databases on its caller's thread."""
    producer, engine = kit.process(ECRole.PRODUCER), kit.engine()
    for n in range(4):
        expect(not producer.save(kit.piece(n)), "a save in another process failed")
    side = engine.scheduler
    with CallTrace() as trace:
        for n in range(8):  # four are there, four are not
            key = kit.key(n)
            if kit.sources.get(key):
                engine.call(side.add_item_source, key, kit.sources[key])
            engine.call(side.ensure_cache_available, [key])
            deadline_s = time.monotonic() + engine.setup.limit_s
            while engine.call(side.has_cache_item, key) is None and time.monotonic() < deadline_s:
                trace.pause(engine.wait)
            engine.call(side.update_state_after_alloc, ECItem(key, 5), BufferSlice(6 * n, 5))
        engine.call(side.build_connector_meta)
        engine.call(side.update_connector_output, ECConnectorOutput(failed_loading={kit.key(1): "tried"}))
        engine.call(side.update_connector_output, ECConnectorOutput(finished_saving=[kit.key(1)]))
        engine.call(side.item_source, kit.key(1))
        engine.call(side.request_finished, "request-1")
        engine.call(side.take_counters)
    expect(not trace.calls, f"the scheduler side did I/O on its caller's thread: {', '.join(trace.calls)}")


@check("look_ups/list_nothing")
def _list_nothing(kit: Kit) -> None:
    """Looking items up lists no folder, and asks no server for all its keys."""
    producer, engine = kit.process(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
    for n in range(4):
        expect(not producer.save(kit.piece(n)), "a save in another process failed")
    engine.look_up(kit.key("first"))  # what it imports for the first look-up is found by listing folders
    before = kit.num_listings()
    with ListingTrace() as trace:
        for n in range(40):
            engine.look_up(kit.key(n))
    expect(not trace.calls, f"look-ups list folders: {', '.join(trace.calls)}")
    listings = kit.num_listings() - before
    expect(not listings, f"{listings} listings of the store for 40 look-ups")


@check("look_ups/quick")
def _quick(kit: Kit) -> None:
    """A call of `has_cache_item` costs microseconds, whether it knows the answer or not."""
    engine = kit.engine(ECRole.CONSUMER)
    _time_look_ups(functools.partial(engine.ask, kit.key(n % 50)) for n in range(400))


@check("look_ups/quick_while_the_store_hangs")
def _quick_while_slow(kit: Kit) -> None:
    """While the store hangs, look-ups answer at once, and with False or True within the time limit."""
    engine = kit.engine(extra=kit.time_limit(1.0))
    embeds = kit.save(engine, kit.key(0))
    with kit.slowed([kit.key(0)]):
        _time_look_ups(functools.partial(engine.ask, kit.key(n)) for n in range(200))
        for n in range(3):
            engine.look_up(kit.key(n))
    kit.eventually(lambda: engine.fetch(kit.key(0), 5).embeds is not None or not engine.save(kit.key(0), embeds),
                   "the store goes on and nothing can be saved")  # fmt: skip
    kit.eventually(lambda: engine.look_up(kit.key(0)), "the store goes on and has_cache_item says False")


@check("look_ups/saved_meanwhile")
def _saved_meanwhile(kit: Kit) -> None:
    """Whoever asks anew finds what was saved before he asked, though it was absent a moment ago."""
    producer, consumer = kit.engine(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
    for n in range(8):  # a "no" may be remembered for less time than a save takes now and then
        key = kit.key(n)
        expect(not consumer.look_up(key), "has_cache_item says that an item is there which nobody saved")
        embeds = kit.save(producer, key)
        expect(
            consumer.look_up(key), "ensure_cache_available named an item that is there, and has_cache_item says False"
        )
        kit.must_fetch(consumer, key, embeds)


@check("look_ups/unknown_news")
def _unknown_news(kit: Kit) -> None:
    """Ends of requests and of orders that a scheduler side never heard of do no harm."""
    engine = kit.engine()
    side = engine.scheduler
    for request_id in ("", "never seen", "x" * 10_000):
        engine.call(side.request_finished, request_id)
    engine.call(side.update_connector_output, ECConnectorOutput())
    strangers = ECConnectorOutput([kit.key(1)], {kit.key(2): "reason"}, [kit.key(3)], {kit.key(4): "reason"})
    engine.call(side.update_connector_output, strangers)
    expect(engine.call(side.ensure_cache_available, []) is True, "ensure_cache_available([]) is not True")
    answer = engine.call(side.ensure_cache_available, [kit.key(5)])
    expect(isinstance(answer, bool), f"ensure_cache_available returned {type(answer).__name__}, not True or False")
    kit.must_fetch(engine, kit.key(1), kit.save(engine, kit.key(1)))


@check("look_ups/bad_sources")
def _bad_sources(kit: Kit) -> None:
    """`add_item_source` takes whatever the network brings; the item is then absent, not an error."""
    engine = kit.engine(ECRole.CONSUMER, extra=kit.time_limit(2.0))
    for n, source in enumerate(_SOURCES + _NOT_ASCII):
        engine.call(engine.scheduler.add_item_source, kit.key(n), source)
        expect(not engine.look_up(kit.key(n)), f"has_cache_item believes in the source {source[:40]!r}")
        expect(engine.load(kit.key(n), 3).reason, f"something was loaded from the source {source[:40]!r}")
    producer = kit.engine(ECRole.PRODUCER)
    kit.must_fetch(engine, kit.key(1), kit.save(producer, kit.key(1)))


def _time_look_ups(calls: Iterable[Callable[[], object]]) -> None:
    seconds, num_long = [], 0
    for call in calls:
        begin_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin_s)
        num_long += seconds[-1] > _WORST_S
        expect(num_long <= _MAX_LONG, f"has_cache_item waited {seconds[-1]:.2f} s")
    median_s = statistics.median(seconds)
    expect(median_s < _MEDIAN_S, f"has_cache_item takes {median_s * 1e3:.1f} ms")
