"""A key names one item, all of the key, in one namespace; and what is no key harms nobody."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import digest, expect
from connectors.conformance.kit import Kit
from core.types import ECRole

_NO_KEYS = [
    "",
    ".",
    "..",
    "a/b",
    "k\0k",
    "k k\r\nDEL *",
    "{tag}",
    "*",
    "%s%n",
    "'; DROP TABLE items; --",
    "\ud7ff",
    "F" * 64,
]


@check("keys/no_keys")
def _no_keys(kit: Kit) -> None:
    """Empty, path-like and 10 kB keys are absent, or are stored like any other; nothing else happens."""
    engine = kit.engine(extra=kit.time_limit(2.0))
    with tempfile.TemporaryDirectory(prefix="triptych-kit-") as folder:
        bystander = Path(folder) / "bystander"
        bystander.write_bytes(b"untouched")
        paths = [str(bystander), f"{folder}/new", "../" * 30 + f"{folder[1:]}/new", f"file://{bystander}"]
        for key in [*_NO_KEYS, *paths, "f" * 10_000, "é" * 5_000]:
            name = f"the key {key[:30]!r}"
            expect(not engine.look_up(key), f"has_cache_item says that {name} is there")
            expect(engine.load(key, 5).reason, f"an item was loaded under {name}, which nobody saved")
            embeds = kit.item(engine, kit.key("under", key.encode()))
            if not engine.save(key, embeds):
                kit.may_fetch(engine, key, embeds)
        expect(bystander.read_bytes() == b"untouched", "a key that is a path was written to")
        expect(os.listdir(folder) == ["bystander"], f"a key that is a path made {os.listdir(folder)}")
    kit.must_fetch(engine, kit.key(1), kit.save(engine, kit.key(1)))


@check("keys/similar")
def _similar(kit: Kit) -> None:
    """Keys that differ in one digit, wherever it stands, name different items."""
    producer, consumer = kit.engine(ECRole.PRODUCER), kit.engine(ECRole.CONSUMER)
    base = kit.key("similar")
    others = [base[:i] + format(int(base[i], 16) ^ 1, "x") + base[i + 1 :] for i in range(64)]
    made = {key: kit.save(producer, key) for key in others}
    expect(not consumer.look_up(base), "an item is found under a key that differs in one digit")
    for key, embeds in made.items():
        kit.must_fetch(consumer, key, embeds)


@check("keys/namespaces")
def _namespaces(kit: Kit) -> None:
    """One key in two namespaces is two items, and an item of another namespace is never loaded."""
    ours, theirs = kit.engine(), kit.engine(namespace=digest(kit.namespace, "another"))
    key = kit.key(1)
    theirs.sources = dict(kit.sources)
    their_item = kit.save(theirs, key, variant="theirs")
    ours.sources = dict(theirs.sources)  # as if the router mixed them up
    expect(not ours.look_up(key), "has_cache_item finds an item of another namespace")
    expect(ours.load(key, 5).reason, "an item of another namespace was loaded")
    ours.sources = {}
    our_item = kit.save(ours, key, variant="ours")
    kit.must_fetch(ours, key, our_item)
    kit.must_fetch(theirs, key, their_item)


@check("keys/similar_namespaces")
def _similar_namespaces(kit: Kit) -> None:
    """Namespaces that differ in one digit may drive out each other's items, never deliver them."""
    key = kit.key(1)
    for i in (0, 15, 16, 31, 32, 63):
        space = kit.namespace[:i] + format(int(kit.namespace[i], 16) ^ 1, "x") + kit.namespace[i + 1 :]
        theirs, ours = kit.engine(namespace=space), kit.engine()
        theirs.sources, ours.sources = {}, {}
        their_item = kit.save(theirs, key, variant="theirs")
        ours.sources = dict(theirs.sources)
        our_item = kit.item(ours, key, variant="ours")
        kit.may_fetch(ours, key, our_item)
        ours.sources = {}
        kit.save(ours, key, variant="ours")
        kit.must_fetch(ours, key, our_item)
        kit.may_fetch(theirs, key, their_item)
        kit.close(ours)
        kit.close(theirs)
