"""The store is gone, full or slow: orders end within their limit, with a reason, and all is well afterwards."""

from __future__ import annotations

import os
import signal

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import expect
from connectors.conformance.engine import SLACK_S, Engine
from connectors.conformance.kit import Kit
from core.types import ECRole

_LIMIT_S = 1.0
_ROWS = 400
_ROW_BYTES = 4096


@check("faults/gone_and_back")
def _gone_and_back(kit: Kit) -> None:
    """A store that cannot be reached: absent, failed loads and saves within the limit; then it is used again."""
    producer = kit.engine(ECRole.PRODUCER, extra=kit.time_limit(_LIMIT_S))
    consumer = kit.engine(ECRole.CONSUMER, extra=kit.time_limit(_LIMIT_S))
    items = {kit.key(n): kit.save(producer, kit.key(n)) for n in range(4)}
    expect(consumer.look_up(kit.key(0)), "has_cache_item says that an item is absent which was saved")
    with kit.stopped():
        for n in range(6):
            consumer.start_loads([(kit.key(n), 5)])
            if n in range(4):
                kit.must_be_right(consumer.loaded(kit.key(n)), items[kit.key(n)])
            else:
                expect(consumer.loaded(kit.key(n)).reason, "an item was loaded which nobody saved")
                consumer.look_up(kit.key(n))
            embeds = kit.item(producer, kit.key("lost", n))
            if not producer.save(kit.key("lost", n), embeds):
                kit.may_fetch(producer, kit.key("lost", n), embeds)
    _works_again(kit, producer, consumer)
    for key, embeds in items.items():
        kit.may_fetch(consumer, key, embeds)


@check("faults/down_at_the_start")
def _down_at_the_start(kit: Kit) -> None:
    """A store that is down at the start is down, not misconfigured; the engine starts, and uses it once it is there."""
    with kit.stopped():
        producer = kit.engine(ECRole.PRODUCER, extra=kit.time_limit(_LIMIT_S))
        consumer = kit.engine(ECRole.CONSUMER, extra=kit.time_limit(_LIMIT_S))
        consumer.look_up(kit.key(1))
        embeds = kit.item(producer, kit.key(1))
        if not producer.save(kit.key(1), embeds):
            kit.may_fetch(consumer, kit.key(1), embeds)
    _works_again(kit, producer, consumer)


@check("faults/full")
def _full(kit: Kit) -> None:
    """A store without room: a save fails with a reason or makes room, what is there stays right, then all is well."""
    given = {"width": _ROW_BYTES // 4, "num_rows": _ROWS + 4, "dtype": "float32", "extra": kit.time_limit(_LIMIT_S)}
    producer, consumer = kit.engine(ECRole.PRODUCER, **given), kit.engine(ECRole.CONSUMER, **given)
    before = kit.save(producer, kit.key("before"), 5)
    with kit.filled():
        for n in range(4):
            embeds = kit.item(producer, kit.key(n), _ROWS)
            if producer.save(kit.key(n), embeds):
                expect(not consumer.look_up(kit.key(n)), "an item whose save failed is found")
            else:
                kit.must_fetch(consumer, kit.key(n), embeds)
        kit.may_fetch(consumer, kit.key("before"), before)
    _works_again(kit, producer, consumer, _ROWS)


@check("faults/slow_loads")
def _slow_loads(kit: Kit) -> None:
    """While the store hangs, a load is reported as failed within the limit; afterwards loads go well again."""
    producer = kit.engine(ECRole.PRODUCER, extra=kit.time_limit(_LIMIT_S))
    consumer = kit.engine(ECRole.CONSUMER, extra=kit.time_limit(_LIMIT_S))
    keys = [kit.key(n) for n in range(4)]
    items = {key: kit.save(producer, key) for key in keys}
    with kit.slowed(keys):
        consumer.start_loads((key, 5) for key in keys)
        for key in keys:
            kit.must_be_right(consumer.loaded(key), items[key])
    _works_again(kit, producer, consumer)


@check("faults/slow_saves")
def _slow_saves(kit: Kit) -> None:
    """While the store hangs, a save is reported within the limit; afterwards saves go well again."""
    producer = kit.engine(ECRole.PRODUCER, extra=kit.time_limit(_LIMIT_S))
    consumer = kit.engine(ECRole.CONSUMER, extra=kit.time_limit(_LIMIT_S))
    keys = [kit.key(n) for n in range(4)]
    items = {key: kit.save(producer, key) for key in keys}
    with kit.slowed(keys):
        for key in keys:
            producer.start_save(key, items[key])
        for key in keys:
            producer.saved(key)
    _works_again(kit, producer, consumer)
    for key in keys:
        kit.may_fetch(consumer, key, items[key])


@check("faults/producer_killed")
def _producer_killed(kit: Kit) -> None:
    """After SIGKILL of its producer an item is whole or missing, within the limit, and can be made again."""
    consumer = kit.engine(ECRole.CONSUMER, extra=kit.time_limit(_LIMIT_S))
    producer = kit.process(ECRole.PRODUCER)
    for n in range(3):
        expect(not producer.save(kit.piece(n)), "a save in another process failed")
    kit.must_fetch(consumer, kit.key(0), kit.item(consumer, kit.key(0)))
    producer.kill()
    for n in range(3):
        kit.may_fetch(consumer, kit.key(n), kit.item(consumer, kit.key(n)))
    _works_again(kit, kit.engine(ECRole.PRODUCER), consumer)


@check("faults/producer_stopped")
def _producer_stopped(kit: Kit) -> None:
    """While the engine that saved it is stopped (SIGSTOP) an item is whole or missing, within the limit."""
    consumer = kit.engine(ECRole.CONSUMER, extra=kit.time_limit(_LIMIT_S))
    producer = kit.process(ECRole.PRODUCER)
    for n in range(3):
        expect(not producer.save(kit.piece(n)), "a save in another process failed")
    kit.must_fetch(consumer, kit.key(0), kit.item(consumer, kit.key(0)))
    os.kill(producer.pid, signal.SIGSTOP)
    try:
        for n in range(3):
            kit.may_fetch(consumer, kit.key(n), kit.item(consumer, kit.key(n)))
        _works_again(kit, kit.engine(ECRole.PRODUCER), consumer)
    finally:
        os.kill(producer.pid, signal.SIGCONT)
    for n in range(3):
        kit.may_fetch(consumer, kit.key(n), kit.item(consumer, kit.key(n)))


def _works_again(kit: Kit, producer: Engine, consumer: Engine, rows: int = 5) -> None:
    """Within a few seconds, what a circuit breaker waits among them."""
    embeds, count, reason = kit.item(producer, kit.key("again"), rows), 0, ""

    def works() -> bool:
        nonlocal count, reason
        count += 1
        reason = producer.save(kit.key("again"), embeds) or kit.may_fetch(consumer, kit.key("again"), embeds).reason
        return not reason

    limit_s = 10 + SLACK_S
    kit.eventually(works, "after the fault, saving and loading an item does not go well", limit_s)
