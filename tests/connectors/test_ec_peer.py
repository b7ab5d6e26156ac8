"""ECPeerConnector when all is well: bytes, sources, leases and room, configuration, closing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from connectors.ec import peer_memory
from connectors.ec.base import MAX_SOURCE_CHARS, BufferSlice, ECConnectorConfig, ECItem, ECSide
from connectors.ec.peer import ECPeerConnector
from connectors.ec.peer_memory import ITEM_OVERHEAD_BYTES
from connectors.ec.store import CHUNK_BYTES
from core.errors import ConfigError
from core.types import ECRole
from tests.connectors.support import (
    DEADLINE_S,
    NAMESPACE,
    ECSides,
    connector_threads,
    key,
    poll_until,
    random_bits,
    same_bits,
)

Closing = Callable[[ECSides], ECSides]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def encoder(role: ECRole = ECRole.PRODUCER, **given: Any) -> ECSides:
    sides = {name: given.pop(name) for name in ("dtype", "width", "num_rows", "namespace") if name in given}
    return ECSides(ECPeerConnector, given, role, **sides)


def consumer(**given: Any) -> ECSides:
    return encoder(ECRole.CONSUMER, **{"lookup_timeout_s": 8, **given})  # for machines that do other things too


def config_with(extra: dict[str, Any]) -> ECConnectorConfig:
    return ECConnectorConfig(ECRole.PRODUCER, NAMESPACE, torch.float32, 6, extra, lambda: None)


def hand_over(producer: ECSides, to: ECSides, n: int = 1) -> str:
    """As the router does."""
    source = producer.scheduler.item_source(key(n))
    to.scheduler.add_item_source(key(n), source)
    return source


def held(producer: ECSides) -> int:
    assert isinstance(producer.worker, ECPeerConnector)
    return len(producer.worker._memory._items)


def no_failures(*sides: ECSides) -> bool:
    return not any(
        count for each in sides for side in (each.scheduler, each.worker) for count in side.take_counters().values()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (197, 96)], ids=str)
def test_items_arrive_bit_for_bit(closing: Closing, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, width = shape
    theirs = closing(encoder(dtype=dtype, width=width, num_rows=1))
    ours = closing(consumer(dtype=dtype, width=width, num_rows=rows + 2))
    embeds = random_bits(rows, width, dtype)
    output = theirs.save(key(1), embeds)
    assert (output.finished_saving, output.bytes_saved, len(output.seconds_saving)) == ([key(1)], embeds.nbytes, 1)
    embeds_before = embeds.clone()
    embeds.view(torch.uint8).zero_()  # reported: it is the engine's again
    source = hand_over(theirs, ours)
    assert len(source) <= MAX_SOURCE_CHARS
    assert source.isprintable()
    assert ours.look_up(key(1)) is True
    output = ours.load(key(1), 1, rows)
    assert (output.finished_loading, output.bytes_loaded) == ([key(1)], embeds.nbytes)
    assert 0 < output.seconds_loading[0] < DEADLINE_S
    assert same_bits(ours.buffer[1 : rows + 1], embeds_before)
    assert not ours.buffer[[0, -1]].view(torch.uint8).any(), "rows of others were written to"
    assert no_failures(theirs, ours)


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 12 * CHUNK_BYTES + 5])
def test_items_of_several_chunks(closing: Closing, num_bytes: int) -> None:
    dtype = torch.float8_e5m2
    theirs = closing(encoder(dtype=dtype, width=1, num_rows=1))
    ours = closing(consumer(dtype=dtype, width=1, num_rows=num_bytes))
    embeds = random_bits(num_bytes, 1, dtype)
    theirs.save(key(1), embeds)
    hand_over(theirs, ours)
    assert ours.load(key(1), 0, num_bytes).finished_loading == [key(1)]
    assert same_bits(ours.buffer, embeds)
    assert no_failures(theirs, ours)


def test_without_a_source_nothing_is_asked_and_nothing_loaded(closing: Closing) -> None:
    ours = closing(consumer())
    assert ours.scheduler.has_cache_item(key(1)) is False, "not even a look-up"
    assert ours.load(key(1), 0, 7).failed_loading == {key(1): "no peer is known to hold the item"}


def test_a_producer_knows_what_it_holds_without_asking(closing: Closing) -> None:
    theirs = closing(encoder())
    assert theirs.scheduler.has_cache_item(key(1)) is False
    assert theirs.scheduler.item_source(key(1)) == ""
    theirs.save(key(1), random_bits(7, 6, torch.float32))
    assert theirs.scheduler.has_cache_item(key(1)) is True
    assert theirs.scheduler.item_source(key(1)) != ""
    assert theirs.scheduler.item_source(key(2)) == ""


def test_saving_what_is_held_already_succeeds_and_takes_no_room(closing: Closing) -> None:
    theirs = closing(encoder())
    embeds = random_bits(7, 6, torch.float32)
    for _ in range(3):
        assert theirs.save(key(1), embeds).finished_saving == [key(1)]
    assert held(theirs) == 1
    assert theirs.worker._memory._used_bytes == embeds.nbytes + ITEM_OVERHEAD_BYTES  # type: ignore[attr-defined]


def test_a_key_alone_entitles_to_nothing(closing: Closing) -> None:
    """Nor does another item's token, nor one of another encoder."""
    theirs, other = closing(encoder()), closing(encoder())
    for n in (1, 2):
        theirs.save(key(n), random_bits(7, 6, torch.float32))
        other.save(key(n), random_bits(7, 6, torch.float32))
    first, second = (theirs.scheduler.item_source(key(n)) for n in (1, 2))
    foreign = other.scheduler.item_source(key(1)).rpartition("/")[2]
    assert len({source.rpartition("/")[2] for source in (first, second)} | {foreign}) == 3
    for token in (second.rpartition("/")[2], foreign, "0" * 32):
        ours = closing(consumer())
        ours.scheduler.add_item_source(key(1), f"{first.rpartition('/')[0]}/{token}")
        assert ours.look_up(key(1)) is False
        reason = ours.load(key(1), 0, 7).failed_loading[key(1)]
        assert "token refused" in reason
        assert not ours.buffer.any()


def test_the_least_recently_used_item_makes_room(closing: Closing) -> None:
    embeds = [random_bits(7, 6, torch.float32) for _ in range(4)]
    room = 3 * (embeds[0].nbytes + ITEM_OVERHEAD_BYTES)
    theirs, ours = closing(encoder(capacity_bytes=max(room, 4096), lease_s=0)), closing(consumer())
    for n in range(3):
        theirs.save(key(n), embeds[n])
        hand_over(theirs, ours, n)
    assert ours.load(key(0), 0, 7).finished_loading == [key(0)]  # used: 1 is now the oldest
    assert theirs.save(key(3), embeds[3]).finished_saving == [key(3)]
    assert [theirs.scheduler.has_cache_item(key(n)) for n in range(4)] == [True, False, True, True]
    assert theirs.worker.take_counters()["evictions"] == 1
    assert ours.look_up(key(1)) is False
    assert "not held any more" in ours.load(key(1), 0, 7).failed_loading[key(1)]
    assert theirs.scheduler.item_source(key(1)) == ""


def test_a_leased_item_stays_until_it_was_pulled(closing: Closing, monkeypatch: pytest.MonkeyPatch) -> None:
    embeds = random_bits(70, 6, torch.float32)  # 1,680 bytes, and the overhead: one fits, two do not
    theirs, ours = closing(encoder(capacity_bytes=4096)), closing(consumer(num_rows=70))
    theirs.save(key(1), embeds)
    assert theirs.worker.num_leased() == 1
    reason = theirs.save(key(2), embeds).failed_saving[key(2)]
    assert "capacity_bytes=4096" in reason
    assert theirs.scheduler.has_cache_item(key(1)) is True
    hand_over(theirs, ours)
    assert ours.load(key(1), 0, 70).finished_loading == [key(1)]
    poll_until(lambda: theirs.worker.num_leased() == 0)
    assert theirs.save(key(2), embeds).finished_saving == [key(2)]
    assert theirs.scheduler.has_cache_item(key(1)) is False


def test_a_lease_ends_by_itself(closing: Closing) -> None:
    theirs = closing(encoder(capacity_bytes=4096, lease_s=0.05))
    embeds = random_bits(70, 6, torch.float32)
    theirs.save(key(1), embeds)
    poll_until(lambda: theirs.worker.num_leased() == 0)
    assert theirs.save(key(2), embeds).finished_saving == [key(2)]


def test_an_item_larger_than_the_memory_evicts_nothing(closing: Closing) -> None:
    theirs = closing(encoder(capacity_bytes=4096, lease_s=0))
    theirs.save(key(1), random_bits(1, 6, torch.float32))
    assert "capacity_bytes" in theirs.save(key(2), random_bits(700, 6, torch.float32)).failed_saving[key(2)]
    assert theirs.scheduler.has_cache_item(key(1)) is True


def test_an_item_being_pulled_is_not_evicted(closing: Closing) -> None:
    theirs = closing(encoder(capacity_bytes=4096, lease_s=0))
    embeds = random_bits(70, 6, torch.float32)
    theirs.save(key(1), embeds)
    theirs.worker._memory.find(key(1))  # type: ignore[attr-defined]  # as for each chunk
    assert key(2) in theirs.save(key(2), embeds).failed_saving


def test_eight_consumers_at_once(closing: Closing) -> None:
    theirs = closing(encoder(width=64, num_rows=1))
    embeds = {n: random_bits(5000 + n, 64, torch.float32) for n in range(3)}
    for n, each in embeds.items():
        theirs.save(key(n), each)
    everybody = [closing(consumer(width=64, num_rows=16_000)) for _ in range(8)]
    for ours in everybody:
        for n in embeds:
            hand_over(theirs, ours, n)
            ours.scheduler.update_state_after_alloc(ECItem(key(n), 5000 + n), BufferSlice(5100 * n, 5000 + n))
        ours.worker.bind_connector_metadata(ours.scheduler.build_connector_meta())
        ours.worker.start_load_caches()
    for ours in everybody:
        loaded: list[str] = []
        while len(loaded) < 3:
            output = ours.report()
            assert not output.failed_loading
            loaded += output.finished_loading
        for n, each in embeds.items():
            assert same_bits(ours.buffer[5100 * n : 5100 * n + 5000 + n], each)
    assert no_failures(theirs, *everybody)


def test_an_engine_that_is_both_loads_its_own_and_others(closing: Closing) -> None:
    one, two = closing(encoder(ECRole.BOTH)), closing(encoder(ECRole.BOTH))
    embeds = random_bits(7, 6, torch.float32)
    one.save(key(1), embeds)
    assert one.look_up(key(1)) is True
    assert one.load(key(1), 0, 7).finished_loading == [key(1)]
    assert same_bits(one.buffer[:7], embeds)
    source = hand_over(one, two)
    assert two.look_up(key(1)) is True
    assert two.load(key(1), 3, 7).finished_loading == [key(1)]
    assert same_bits(two.buffer[3:10], embeds)
    assert two.scheduler.item_source(key(1)) == source, "it can be had where it was had"
    assert no_failures(one, two)


def test_a_consumer_stores_nothing(closing: Closing) -> None:
    ours = closing(consumer())
    assert "ec_consumer" in ours.save(key(1), random_bits(7, 6, torch.float32)).failed_saving[key(1)]


def test_another_slice_than_the_item_has_fails_by_name(closing: Closing) -> None:
    theirs, ours = closing(encoder()), closing(consumer())
    theirs.save(key(1), random_bits(7, 6, torch.float32))
    hand_over(theirs, ours)
    assert "shape of the item is (7, 6), not (8, 6)" in ours.load(key(1), 0, 8).failed_loading[key(1)]
    assert not ours.buffer.any()


def test_a_newer_source_takes_the_place_of_an_older_one(closing: Closing) -> None:
    gone, theirs, ours = closing(encoder()), closing(encoder()), closing(consumer())
    embeds = random_bits(7, 6, torch.float32)
    for each in (gone, theirs):
        each.save(key(1), embeds)
    hand_over(gone, ours)
    gone.close()
    assert ours.look_up(key(1)) is False
    hand_over(theirs, ours)
    assert ours.look_up(key(1)) is True
    assert ours.load(key(1), 0, 7).finished_loading == [key(1)]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "nonsense",
        "ipc:///tmp/x/" + "0" * 32 + "/" + "0" * 32,
        "tcp://127.0.0.1:0/" + "0" * 32 + "/" + "0" * 32,
        "tcp://127.0.0.1:65536/" + "0" * 32 + "/" + "0" * 32,
        "tcp://127.0.0.1;127.0.0.2:5000/" + "0" * 32 + "/" + "0" * 32,
        "tcp://127.0.0.1:5000/" + "0" * 32 + "/" + "0" * 31 + "g",
        "tcp://127.0.0.1:5000/" + "0" * 32 + "/" + "0" * 32 + "\n",
        "tcp://127.0.0.1:5000/" + "0" * 32 + "/" + "0" * 2000,
        "tcp://" + "a" * 300 + ":5000/" + "0" * 32 + "/" + "0" * 32,
    ],
)
def test_what_is_not_a_source_is_not_taken(closing: Closing, source: str) -> None:
    ours = closing(consumer())
    ours.scheduler.add_item_source(key(1), source)
    ours.scheduler.add_item_source("../../etc/passwd", "tcp://127.0.0.1:5000/" + "0" * 32 + "/" + "0" * 32)
    assert ours.scheduler.has_cache_item(key(1)) is False
    assert ours.scheduler.has_cache_item("../../etc/passwd") is False


def test_memory_of_sources_is_bounded(closing: Closing) -> None:
    ours = closing(consumer())
    lookups = ours.scheduler._peer_lookups  # type: ignore[attr-defined]
    lookups._max_items = 10
    for n in range(30):
        ours.scheduler.add_item_source(key(n), "tcp://127.0.0.1:5000/" + "0" * 32 + "/" + "0" * 32)
    assert len(lookups._known) == 10
    assert ours.scheduler.has_cache_item(key(0)) is False


def test_a_save_whose_limit_has_passed_does_not_become_visible(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, read = threading.Event(), threading.Event()
    copy = peer_memory._copy

    def slowly(*given: Any) -> Any:
        item = copy(*given)
        read.set()
        go.wait(DEADLINE_S)
        return item

    monkeypatch.setattr(peer_memory, "_copy", slowly)
    theirs = closing(encoder(timeout_s=1, num_threads=1))
    reason = theirs.save(key(1), random_bits(7, 6, torch.float32)).failed_saving[key(1)]
    assert "timeout_s" in reason
    assert read.is_set()
    go.set()
    monkeypatch.setattr(peer_memory, "_copy", copy)
    assert theirs.save(key(2), random_bits(7, 6, torch.float32)).finished_saving == [key(2)]
    poll_until(lambda: theirs.worker._memory._used_bytes == 7 * 6 * 4 + ITEM_OVERHEAD_BYTES)  # type: ignore[attr-defined]
    assert theirs.scheduler.has_cache_item(key(1)) is False
    assert held(theirs) == 1


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"host": "tcp://x"}, "host"),
        ({"bind_host": "*"}, "bind_host"),
        ({"bind_host": "host.invalid"}, "bind_host"),
        ({"port": 70000}, "port"),
        ({"port": "http"}, "port"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"lease_s": -1}, "lease_s"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"redis_url": "x"}, "redis_url"),
    ],
    ids=str,
)
def test_what_the_operator_wrote_wrongly_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"--ec-connector-extra-config {named}"):
        ECPeerConnector(config_with(extra), ECSide.WORKER)
    assert connector_threads() == []


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            ECPeerConnector(config_with({"port": port}), ECSide.WORKER)


def test_the_address_that_consumers_see_is_host_not_bind_host(closing: Closing) -> None:
    theirs, ours = closing(encoder(host="localhost", bind_host="0.0.0.0")), closing(consumer())
    theirs.save(key(1), random_bits(7, 6, torch.float32))
    assert hand_over(theirs, ours).startswith("tcp://localhost:")
    assert ours.look_up(key(1)) is True
    assert ours.load(key(1), 0, 7).finished_loading == [key(1)]


def test_the_scheduler_side_alone_has_no_port() -> None:
    side = ECPeerConnector(config_with({}), ECSide.SCHEDULER)
    assert side._server is None
    assert side.handshake() == ""
    side.set_handshake("")
    assert side.item_source(key(1)) == ""
    side.close()


def test_an_idle_connector_sleeps(closing: Closing) -> None:
    theirs, ours = closing(encoder()), closing(consumer())
    theirs.save(key(1), random_bits(7, 6, torch.float32))
    hand_over(theirs, ours)
    assert ours.load(key(1), 0, 7).finished_loading == [key(1)]
    begin_s = time.process_time()
    time.sleep(0.3)  # what is measured: an idle while
    assert time.process_time() - begin_s < 0.1
