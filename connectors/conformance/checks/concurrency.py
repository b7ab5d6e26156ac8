"""Many engines at once, and engines that are killed: an item is visible whole or not at all."""

from __future__ import annotations

import time

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import expect
from connectors.conformance.engine_process import Piece, checksum
from connectors.conformance.kit import Kit
from core.types import ECRole

_NUM_PROCESSES = 8
_ROLES = (ECRole.PRODUCER, ECRole.CONSUMER)
_WIDE = {"width": 1024, "dtype": "float32"}  # 4 KiB a row
_ROWS = 512  # 2 MiB
_LARGE_ROWS = 2048  # 8 MiB


@check("concurrency/writers_and_readers", limit_s=60)
def _writers_and_readers(kit: Kit) -> None:
    """Eight processes write the same keys, each other bits, and eight read them: all find what one of them wrote."""
    seconds = 8.0 if kit.settings.thorough else 1.0
    pieces = [[Piece(kit.key(n), 64, f"writer {w}") for n in range(4)] for w in range(_NUM_PROCESSES)]
    writers = [kit.process(ECRole.PRODUCER, **_WIDE) for _ in range(_NUM_PROCESSES)]
    readers = [kit.process(ECRole.CONSUMER, **_WIDE) for _ in range(_NUM_PROCESSES)]
    for writer, theirs in zip(writers, pieces, strict=True):
        if theirs is pieces[0]:  # for connectors where a reader must be told whom to ask
            for piece in theirs:
                expect(not writer.save(piece), "a save failed")
        writer.begin_writing(theirs, seconds)
    ours = kit.engine(ECRole.CONSUMER, **_WIDE)
    allowed = [checksum(piece.make(1024, ours.buffer.dtype)) for theirs in pieces for piece in theirs]
    for reader in readers:
        reader.begin_reading(pieces[0], seconds, allowed)
    limit_s = seconds + 2 * ours.setup.limit_s
    for writer in writers:
        expect(writer.ended(limit_s) >= len(pieces[0]), "a writer wrote nothing")
    loads = sum(reader.ended(limit_s) for reader in readers)
    expect(loads > 0, "no reader ever found an item")
    for piece in pieces[0]:
        kit.eventually(lambda key=piece.key: ours.look_up(key), "a saved item is not found")  # type: ignore[misc]
        loaded = ours.load(piece.key, piece.rows)
        expect(loaded.embeds is not None, f"an item that eight saved cannot be loaded: {loaded.reason}")
        expect(loaded.embeds is not None and checksum(loaded.embeds) in allowed, "a tensor that no writer wrote")


@check("concurrency/reader_during_write", limit_s=60)
def _reader_during_write(kit: Kit) -> None:
    """A reader that asks while a large item is written finds nothing or all of it."""
    producer, consumer = (kit.engine(role, num_rows=_LARGE_ROWS + 8, **_WIDE) for role in _ROLES)
    for n in range(12 if kit.settings.thorough else 4):
        key = kit.key(n)
        embeds = kit.item(producer, key, _LARGE_ROWS)
        expect(consumer.ask(key) is not True, "has_cache_item says that an item is there which nobody saved")
        producer.start_save(key, embeds)
        while True:
            if consumer.look_up(key):
                loaded = consumer.load(key, _LARGE_ROWS)
                expect(loaded.embeds is not None, f"an item is visible before it can be loaded: {loaded.reason}")
                kit.must_be_right(loaded, embeds)
            producer.poll()
            if producer.has_saved(key):
                break
        reason = producer.saved(key)
        expect(not reason, f"a save failed: {reason}")
        kit.eventually(lambda key=key: consumer.look_up(key), "a saved item is not found")  # type: ignore[misc]
        kit.must_fetch(consumer, key, embeds)


@check("concurrency/writer_killed", limit_s=60)
def _writer_killed(kit: Kit) -> None:
    """A writer killed at a random moment leaves its item whole or missing, and in nobody's way."""
    producer, consumer = (kit.engine(role, num_rows=_ROWS + 4, **_WIDE) for role in _ROLES)
    begin_s = time.monotonic()
    kit.save(producer, kit.key("trial"), _ROWS)
    usual_s = time.monotonic() - begin_s
    for n in range(40 if kit.settings.thorough else 10):
        writer = kit.process(ECRole.PRODUCER, num_rows=8, **_WIDE)
        piece = kit.piece(n, _ROWS)
        embeds = kit.item(producer, piece.key, _ROWS)
        writer.begin_save(piece)
        time.sleep(kit.random.uniform(0.0, 2 * usual_s + 0.01))  # it makes the item first
        kit.kill(writer)
        kit.may_fetch(consumer, piece.key, embeds)
        kit.save(producer, piece.key, _ROWS)
        kit.eventually(lambda key=piece.key: consumer.look_up(key), "a saved item is not found")  # type: ignore[misc]
        kit.must_fetch(consumer, piece.key, embeds)


@check("concurrency/reader_killed", limit_s=60)
def _reader_killed(kit: Kit) -> None:
    """A reader killed at a random moment does no harm to the item, nor to writers and other readers."""
    producer, consumer = (kit.engine(role, num_rows=_ROWS + 4, **_WIDE) for role in _ROLES)
    pieces = [kit.piece(n, _ROWS) for n in range(3)]
    items = {piece.key: kit.save(producer, piece.key, _ROWS) for piece in pieces}
    for n in range(20 if kit.settings.thorough else 6):
        reader = kit.process(ECRole.CONSUMER, num_rows=_ROWS + 4, **_WIDE)
        piece = pieces[n % len(pieces)]
        reader.begin_fetch(piece)
        time.sleep(kit.random.uniform(0.0, 0.02))
        kit.kill(reader)
        kit.must_fetch(consumer, piece.key, items[piece.key])
        kit.save(producer, piece.key, _ROWS)
