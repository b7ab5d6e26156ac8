"""What was saved is loaded, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import DTYPES, PAINT, RefusedError, expect
from connectors.conformance.engine import Engine
from connectors.conformance.harness import NotTriedError
from connectors.conformance.kit import MAX_ITEM_MIB, Kit
from core.types import ECRole

_MIB = 1 << 20
_SHAPES = [(1, 1), (3, 5), (63, 61), (1, 4099), (130, 7)]
_SIZES = [1, 2, 1023, 4097, _MIB - 1, _MIB, _MIB + 1, 16 * _MIB + 3]
_LARGE_MIB = (64, MAX_ITEM_MIB)
#: For an order, where the harness can set it: a busy machine may take long for so much.
_LARGE_S = 60.0


def _dtype(name: str) -> Callable[[Kit], None]:
    def run(kit: Kit) -> None:
        for rows, width in _SHAPES:
            given = {"dtype": name, "width": width, "num_rows": rows + 4}
            producer, consumer = kit.engine(ECRole.PRODUCER, **given), kit.engine(ECRole.CONSUMER, **given)
            key = kit.key(name, rows, width)
            kit.must_fetch(consumer, key, kit.save(producer, key, rows))
            kit.close(consumer)
            kit.close(producer)

    run.__doc__ = f"Items of {name} in odd shapes come back bit for bit, or the dtype is refused at the start."
    return run


for _name in DTYPES:
    check(f"round_trip/{_name}")(_dtype(_name))


@check("round_trip/sizes", limit_s=60)
def _sizes(kit: Kit) -> None:
    """Items from 1 byte to 16 MiB come back bit for bit."""
    for num_bytes in _SIZES:
        producer, consumer = (_by_the_byte(kit, role, num_bytes) for role in (ECRole.PRODUCER, ECRole.CONSUMER))
        rows = num_bytes // producer.buffer[0].nbytes or 1
        kit.must_fetch(consumer, kit.key(num_bytes), kit.save(producer, kit.key(num_bytes), rows))
        kit.close(consumer)
        kit.close(producer)


def _by_the_byte(kit: Kit, role: ECRole, num_bytes: int, extra: Mapping[str, Any] | None = None) -> Engine:
    """Rows of few bytes for few bytes: of one, if the connector takes a dtype of one."""
    width = 1 if num_bytes % 4096 else 4096
    given: dict[str, Any] = {"width": width, "num_rows": num_bytes // width + 3, "extra": extra or {}}
    try:
        return kit.engine(role, dtype="float8_e4m3fn", **given)
    except RefusedError:
        return kit.engine(role, **given)


def _large(mib: int) -> Callable[[Kit], None]:
    def run(kit: Kit) -> None:
        if mib > kit.settings.max_item_mib:
            raise NotTriedError(f"larger than --max-item-mib {kit.settings.max_item_mib}")
        extra = kit.time_limit(_LARGE_S)
        producer, consumer = (_by_the_byte(kit, role, mib * _MIB, extra) for role in (ECRole.PRODUCER, ECRole.CONSUMER))
        embeds = kit.item(producer, kit.key(mib), mib * _MIB // producer.buffer[0].nbytes)
        if reason := producer.save(kit.key(mib), embeds):  # it may be too large for the store as it is
            raise NotTriedError(f"it was not saved: {reason}")
        kit.must_fetch(consumer, kit.key(mib), embeds)

    run.__doc__ = f"An item of {mib} MiB comes back bit for bit."
    return run


for _mib in _LARGE_MIB:
    check(f"round_trip/{_mib}_MiB", limit_s=240)(_large(_mib))


@check("round_trip/other_process")
def _other_process(kit: Kit) -> None:
    """What one process saves, another one loads; also one that began before the save."""
    consumer = kit.engine(ECRole.CONSUMER)
    expect(not consumer.look_up(kit.key(1)), "has_cache_item says that an item is there which nobody saved")
    producer = kit.process(ECRole.PRODUCER)
    expect(not producer.save(kit.piece(1)), "a save in another process failed")
    embeds = kit.item(consumer, kit.key(1))
    kit.eventually(lambda: consumer.look_up(kit.key(1)), "has_cache_item says that a saved item is absent")
    kit.must_fetch(consumer, kit.key(1), embeds)


@check("round_trip/view_of_the_buffer")
def _view(kit: Kit) -> None:
    """What is saved from the middle of the encoder buffer is that part and no other."""
    producer, consumer = kit.engine(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
    embeds = kit.item(producer, kit.key(1), 9)
    producer.buffer[100:109] = embeds
    reason = producer.save(kit.key(1), producer.buffer[100:109])
    expect(not reason, f"a save failed: {reason}")
    producer.buffer.view(torch.uint8)[100:109] = PAINT  # the engine's own again
    kit.must_fetch(consumer, kit.key(1), embeds)


@check("round_trip/many_in_a_step")
def _many(kit: Kit) -> None:
    """Forty items saved and loaded at once all arrive, each reported once, and failures and evictions count zero."""
    producer, consumer = kit.engine(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
    sizes = {kit.key(n): 1 + n % 7 for n in range(40)}
    made = {key: kit.item(producer, key, rows) for key, rows in sizes.items()}
    for key, embeds in made.items():
        producer.start_save(key, embeds)
    for key in made:
        reason = producer.saved(key)
        expect(not reason, f"a save failed: {reason}")
    for key in made:
        expect(consumer.look_up(key), "has_cache_item says that an item is absent which was saved")
    consumer.start_loads(sizes.items())
    for key, embeds in made.items():
        loaded = consumer.loaded(key)
        expect(loaded.embeds is not None, f"one of many loads failed: {loaded.reason}")
        kit.must_be_right(loaded, embeds)
    for engine in (producer, consumer):
        engine.settle()
        expect(not any(engine.counters.values()), f"without a fault take_counters said {engine.counters}")


@check("round_trip/saved_again")
def _saved_again(kit: Kit) -> None:
    """Saving an item that is there succeeds and leaves it right."""
    engine = kit.engine()
    embeds = kit.save(engine, kit.key(1))
    kit.save(engine, kit.key(1))
    kit.must_fetch(engine, kit.key(1), embeds)
    kit.save(engine, kit.key(1))
    kit.must_fetch(engine, kit.key(1), embeds)


@check("round_trip/not_as_ordered")
def _not_as_ordered(kit: Kit) -> None:
    """An item of other rows, width or dtype than the consumer expects fails as data."""
    producer = kit.engine(ECRole.PRODUCER)
    consumers = [kit.engine(ECRole.CONSUMER), kit.engine(ECRole.CONSUMER, width=12)]
    kit.save(producer, kit.key(1), 6)
    for consumer, rows in zip(consumers, (5, 12), strict=True):
        if consumer.look_up(kit.key(1)):
            expect(consumer.load(kit.key(1), rows).reason, "an item was loaded into a slice of another shape")


@check("round_trip/absent")
def _absent(kit: Kit) -> None:
    """An item that nobody saved is absent, and loading it all the same fails with a reason."""
    for role in (ECRole.CONSUMER, ECRole.BOTH):
        engine = kit.engine(role)
        expect(not engine.look_up(kit.key("never")), "has_cache_item says that an item is there which nobody saved")
        expect(engine.load(kit.key("never"), 5).reason, "an item was loaded which nobody saved")
        kit.must_fetch(engine, kit.key(1), kit.save(kit.engine(ECRole.PRODUCER), kit.key(1)))
