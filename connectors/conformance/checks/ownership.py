"""What belongs to whom, and until when: a slice until its report, a saved tensor until its report, once."""

from __future__ import annotations

import time

import torch

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import expect
from connectors.conformance.kit import Kit
from core.types import ECRole

_LIMIT_S = 1.0
_LATE_S = 0.6


@check("ownership/reported_once")
def _reported_once(kit: Kit) -> None:
    """Every order is reported exactly once: saves and loads that go well and that fail, and the same key again."""
    engine = kit.engine()
    for _ in range(3):
        embeds = kit.save(engine, kit.key(1))
        loaded = engine.load(kit.key(1), 5)
        kit.must_be_right(loaded, embeds)
        expect(engine.load(kit.key("never"), 5).reason, "an item was loaded which nobody saved")
    engine.settle(0.5)


@check("ownership/saved_tensor_unchanged")
def _unchanged(kit: Kit) -> None:
    """A tensor that is saved is read and not written; the slices of loads are written and nothing around them."""
    engine = kit.engine()
    embeds = kit.item(engine, kit.key(1), 50)
    before = embeds.clone()
    expect(not engine.save(kit.key(1), embeds), "a save failed")
    expect(torch.equal(embeds.view(torch.uint8), before.view(torch.uint8)), "a tensor was changed while it was saved")
    for rows in (50, 49, 51):
        kit.must_be_right(engine.load(kit.key(1), rows), before)
    engine.settle(0.2)


@check("ownership/rows_out_of_the_buffer")
def _rows_out(kit: Kit) -> None:
    """A slice given back is the engine's: failed loads do not write to it any more."""
    engine = kit.engine()
    for n in range(20):
        engine.start_loads((kit.key(n, m), 5) for m in range(8))
        for m in range(8):
            expect(engine.loaded(kit.key(n, m)).reason, "an item was loaded which nobody saved")
    engine.settle(0.2)


@check("ownership/late_load")
def _late_load(kit: Kit) -> None:
    """A load that took longer than its limit writes nothing into the slice that was given back."""
    engine = kit.engine(extra=kit.time_limit(_LIMIT_S))
    keys = [kit.key(n) for n in range(3)]
    items = {key: kit.save(engine, key, 40) for key in keys}
    with kit.slowed(keys):
        engine.start_loads((key, 40) for key in keys)
        for key in keys:
            kit.must_be_right(engine.loaded(key), items[key])
    engine.settle(_LATE_S)


@check("ownership/late_save")
def _late_save(kit: Kit) -> None:
    """A save that took longer than its limit does not publish what the tensor holds afterwards."""
    engine = kit.engine(extra=kit.time_limit(_LIMIT_S))
    keys = [kit.key(n) for n in range(3)]
    tensors = {key: kit.item(engine, key, 40) for key in keys}
    with kit.slowed(keys):
        for key, tensor in tensors.items():
            engine.start_save(key, tensor)
        for key, tensor in tensors.items():
            engine.saved(key)
            tensor.view(torch.uint8).fill_(0x5A)  # another item's by now
    time.sleep(_LATE_S)
    engine.settle()
    reader = kit.engine(ECRole.CONSUMER)
    for key in keys:
        kit.may_fetch(reader, key, kit.item(reader, key, 40))
