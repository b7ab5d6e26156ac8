"""Capacity and time to live are kept: present, then absent again."""

from __future__ import annotations

import time

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import expect
from connectors.conformance.kit import Kit
from core.types import ECRole

_ROW_BYTES = 4096
_ROWS = 64  # a quarter of a MiB
_CAPACITY_BYTES = 4 << 20
#: A connector may count what is not payload, keep its cap a little late, and evict more than it must.
_OVER, _UNDER = 1.25, 0.25
_TTL_S = 1.0


@check("limits/capacity")
def _capacity(kit: Kit) -> None:
    """A store with a capacity keeps it: old items are absent again, new ones are there and right."""
    extra = kit.capacity(_CAPACITY_BYTES)
    given = {"extra": extra, "width": _ROW_BYTES // 4, "num_rows": _ROWS + 4, "dtype": "float32"}
    producer = kit.engine(ECRole.PRODUCER, **given)
    item_bytes = _ROWS * _ROW_BYTES
    keys = [kit.key(n) for n in range(3 * _CAPACITY_BYTES // item_bytes)]
    made = {}
    for key in keys:
        made[key] = kit.save(producer, key, _ROWS)
        time.sleep(0.005)  # the clocks of file systems are coarse: which one is the oldest is to be clear

    def present() -> list[str]:
        while True:
            consumer = kit.engine(ECRole.CONSUMER, **given)  # that remembers nothing
            found = [key for key in keys if consumer.look_up(key)]
            consumer.poll()
            kit.close(consumer)
            if not consumer.counters.get("lookup_failures"):  # else what is said to be absent may be there
                return found

    kit.eventually(
        lambda: len(present()) * item_bytes <= _OVER * _CAPACITY_BYTES, "the store holds more than its cap", 8.0
    )
    found = present()
    expect(len(found) * item_bytes >= _UNDER * _CAPACITY_BYTES, f"the store holds {len(found)} of {len(keys)} items")
    expect(keys[-1] in found, "the newest item was evicted")
    consumer = kit.engine(ECRole.CONSUMER, **given)
    gone = next((key for key in keys if key not in found), None)
    expect(gone is not None, "nothing was evicted")
    expect(consumer.load(gone or "", _ROWS).reason, "an evicted item was loaded")
    kit.must_fetch(consumer, keys[-1], made[keys[-1]])
    kit.save(producer, gone or "", _ROWS)
    kit.eventually(lambda: consumer.look_up(gone or ""), "an item made again after its eviction is not found")
    kit.must_fetch(consumer, gone or "", made[gone or ""])
    expect(producer.counters.get("evictions", 1) > 0, "evictions are counted as none")


@check("limits/larger_than_the_store")
def _too_large(kit: Kit) -> None:
    """An item larger than the store is not saved, with a reason, and does no harm to others."""
    rows = 2 * _CAPACITY_BYTES // _ROW_BYTES
    given = {"extra": kit.capacity(_CAPACITY_BYTES), "width": _ROW_BYTES // 4, "num_rows": rows + 4, "dtype": "float32"}
    producer, consumer = kit.engine(ECRole.PRODUCER, **given), kit.engine(ECRole.CONSUMER, **given)
    reason = producer.save(kit.key("large"), kit.item(producer, kit.key("large"), rows))
    expect(reason, "an item twice as large as the capacity was reported as saved")
    expect(not consumer.look_up(kit.key("large")), "an item whose save failed is found")
    kit.must_fetch(consumer, kit.key(1), kit.save(producer, kit.key(1), _ROWS))


@check("limits/time_to_live")
def _ttl(kit: Kit) -> None:
    """An item is there at first, and absent once its time is over; then it can be made again."""
    extra = kit.ttl(_TTL_S)
    producer = kit.engine(ECRole.PRODUCER, extra=extra)
    embeds = kit.save(producer, kit.key(1))
    saved_s = time.monotonic()
    consumer = kit.engine(ECRole.CONSUMER, extra=extra)
    found = consumer.look_up(kit.key(1))
    expect(found or time.monotonic() - saved_s > _TTL_S / 2, "an item is absent before its time is over")
    kit.close(consumer)

    def absent() -> bool:
        late = kit.engine(ECRole.CONSUMER, extra=extra)  # that remembers nothing
        found = late.look_up(kit.key(1))
        kit.close(late)
        return not found

    time.sleep(max(0.0, saved_s + _TTL_S - time.monotonic()))
    kit.eventually(absent, f"an item with {_TTL_S:g} s to live is found", 5.0)
    late = kit.engine(ECRole.CONSUMER, extra=extra)
    expect(late.load(kit.key(1), 5).reason, "an item whose time was over was loaded")

    def found_again() -> bool:
        kit.save(producer, kit.key(1))  # each time: its time may be over before a busy machine looks it up
        return late.look_up(kit.key(1))

    kit.eventually(found_again, "an item made again after its time is not found")
    kit.may_fetch(late, kit.key(1), embeds)
