"""ECPeerConnector against encoders that are gone, silent, wrong or hostile."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import zmq

from connectors.ec.base import BufferSlice, ECItem
from connectors.ec.peer import ECPeerConnector
from connectors.ec.peer_wire import (
    Ask,
    Chunk,
    Done,
    Failed,
    Found,
    Hello,
    Item,
    Open,
    Pull,
    Refused,
    Request,
    Welcome,
    encode,
)
from connectors.ec.store import CHUNK_BYTES, LoadTarget
from connectors.peer_messages import MAX_HEADER_BYTES
from core.types import ECRole
from tests.connectors.ec_peer_process import Encoder
from tests.connectors.ec_peer_script import INSTANCE, TOKEN, Line, Parcel, Scripted
from tests.connectors.support import DEADLINE_S, NAMESPACE, ECSides, key, poll_until, random_bits, same_bits

Closing = Callable[[ECSides], ECSides]
#: Of an item of several chunks, more than are in flight at once.
ROWS = 20 * CHUNK_BYTES // 24


def encoder(role: ECRole = ECRole.PRODUCER, *, num_rows: int = 32, **extra: Any) -> ECSides:
    return ECSides(ECPeerConnector, extra, role, num_rows=num_rows)


def consumer(num_rows: int = 32, **extra: Any) -> ECSides:
    return encoder(ECRole.CONSUMER, num_rows=num_rows, **extra)


def order(ours: ECSides, n: int, num_rows: int, start: int = 0) -> None:
    """Order a load and do not wait for it."""
    ours.scheduler.update_state_after_alloc(ECItem(key(n), num_rows), BufferSlice(start, num_rows))
    ours.worker.bind_connector_metadata(ours.scheduler.build_connector_meta())
    ours.worker.start_load_caches()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    peer = Scripted()
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def encoders() -> Iterator[tuple[Encoder, Encoder]]:
    """One for all tests that leave it alive, and one to be killed. Both at once: they take seconds to start."""
    both = Encoder(3, ROWS), Encoder(1, ROWS)
    yield both
    for each in both:
        each.close()


@pytest.fixture(scope="module")
def elsewhere(encoders: tuple[Encoder, Encoder]) -> Encoder:
    return encoders[0]


@pytest.fixture(scope="module")
def items(elsewhere: Encoder) -> tuple[list[str], bytes]:
    return elsewhere.ready()


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The consumer stops at its first chunk, sets the first event, and waits for the second."""
    begun, go = threading.Event(), threading.Event()
    write = LoadTarget.write

    def wait(self: LoadTarget, *given: Any) -> None:
        begun.set()
        assert go.wait(DEADLINE_S)
        write(self, *given)

    monkeypatch.setattr(LoadTarget, "write", wait)
    return begun, go


# ---- gone ----


def test_an_encoder_that_is_killed_in_the_middle_of_a_pull(
    closing: Closing, encoders: tuple[Encoder, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = encoders[1]
    (source,), _ = doomed.ready()
    ours = closing(consumer(ROWS, timeout_s=2 * DEADLINE_S))
    ours.scheduler.add_item_source(key(1), source)
    assert ours.look_up(key(1)) is True
    begun, go = held_up(monkeypatch)
    order(ours, 1, ROWS)
    assert begun.wait(DEADLINE_S)
    doomed.close()
    go.set()
    reason = ours.report().failed_loading[key(1)]
    assert "could not be made" in reason
    assert ours.look_up(key(1)) is False
    assert ours.scheduler.take_counters()["lookup_failures"] > 0


def test_an_encoder_that_was_started_again_has_not_what_it_had(closing: Closing) -> None:
    theirs, ours = closing(encoder()), closing(consumer())
    embeds = random_bits(7, 6, torch.float32)
    theirs.save(key(1), embeds)
    source = theirs.scheduler.item_source(key(1))
    port = int(source.split("/")[2].rpartition(":")[2])
    theirs.close()
    again = closing(encoder(port=port))
    again.save(key(1), embeds)
    ours.scheduler.add_item_source(key(1), source)
    assert ours.look_up(key(1)) is False
    assert ours.scheduler.take_counters()["lookup_failures"] == 0, "it answered"
    assert "started again" in ours.load(key(1), 0, 7).failed_loading[key(1)]
    ours.scheduler.add_item_source(key(1), again.scheduler.item_source(key(1)))
    assert ours.look_up(key(1)) is True
    assert ours.load(key(1), 0, 7).finished_loading == [key(1)]


def test_a_line_that_is_cut_is_made_again_and_only_the_rest_is_pulled(
    closing: Closing, items: tuple[list[str], bytes]
) -> None:
    sources, raw = items
    port = int(sources[0].split("/")[2].rpartition(":")[2])
    line = Line(port, cut_after=12 * CHUNK_BYTES)
    try:
        ours = closing(consumer(ROWS))
        ours.scheduler.add_item_source(key(1), sources[0].replace(f":{port}/", f":{line.port}/"))
        output = ours.load(key(1), 0, ROWS)
        assert output.finished_loading == [key(1)]
        assert ours.buffer.view(torch.uint8).numpy().tobytes() == raw
        assert line.num_lines == 2
        assert line.num_bytes < len(raw) + 10 * CHUNK_BYTES, "what had arrived was pulled again"
    finally:
        ours.close()
        line.close()


def test_a_peer_that_is_gone_is_left_alone_until_it_may_be_back(closing: Closing) -> None:
    theirs = closing(encoder())
    embeds = random_bits(7, 6, torch.float32)
    theirs.save(key(1), embeds)
    gone = theirs.scheduler.item_source(key(1))
    theirs.close()
    ours = closing(consumer(breaker_failures=2, breaker_cooldown_s=1.0))
    ours.scheduler.add_item_source(key(1), gone)
    for _ in range(2):
        assert "could not be made" in ours.load(key(1), 0, 7).failed_loading[key(1)]
    assert "left alone" in ours.load(key(1), 0, 7).failed_loading[key(1)]
    assert ours.worker.take_counters()["breaker_opens"] == 1
    port = int(gone.split("/")[2].rpartition(":")[2])
    back = closing(encoder(port=port))
    back.save(key(1), embeds)
    ours.scheduler.add_item_source(key(1), back.scheduler.item_source(key(1)))
    poll_until(lambda: ours.load(key(1), 0, 7).finished_loading == [key(1)])
    assert same_bits(ours.buffer[:7], embeds)


# ---- silent ----


def test_a_stopped_encoder_does_not_slow_the_others_and_recovers(
    closing: Closing, elsewhere: Encoder, items: tuple[list[str], bytes]
) -> None:
    (stopped, *_), raw = items
    alive = closing(encoder())
    embeds = random_bits(7, 6, torch.float32)
    alive.save(key(9), embeds)
    limits = {"timeout_s": 3, "lookup_timeout_s": 1.5, "breaker_failures": 3, "breaker_cooldown_s": 0.2}
    ours = closing(consumer(ROWS + 7, **limits))
    ours.scheduler.add_item_source(key(1), stopped)
    ours.scheduler.add_item_source(key(9), alive.scheduler.item_source(key(9)))
    elsewhere.signal(signal.SIGSTOP)
    try:
        order(ours, 1, ROWS, 7)
        assert ours.scheduler.has_cache_item(key(1)) is None
        assert ours.look_up(key(9)) is True
        assert ours.scheduler.has_cache_item(key(1)) is None, "the other look-up waited for this one"
        assert ours.load(key(9), 0, 7).finished_loading == [key(9)], "the other load waited for this one"
        assert ours.look_up(key(1)) is False
        reason = ours.report().failed_loading[key(1)]
        assert "sent nothing" in reason
    finally:
        elsewhere.signal(signal.SIGCONT)
    assert same_bits(ours.buffer[:7], embeds)
    poll_until(lambda: ours.load(key(1), 7, ROWS).finished_loading == [key(1)])
    assert ours.buffer[7:].view(torch.uint8).numpy().tobytes() == raw


def test_a_pause_shorter_than_the_limit_costs_nothing_but_time(
    closing: Closing, elsewhere: Encoder, items: tuple[list[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again over a new line, and goes on with what is lacking."""
    (source, *_), raw = items
    ours = closing(consumer(ROWS, timeout_s=4))
    ours.scheduler.add_item_source(key(1), source)
    begun, go = held_up(monkeypatch)
    order(ours, 1, ROWS)
    assert begun.wait(DEADLINE_S)
    elsewhere.signal(signal.SIGSTOP)
    timer = threading.Timer(1.3, elsewhere.signal, [signal.SIGCONT])
    timer.start()
    go.set()
    assert ours.report().finished_loading == [key(1)]
    timer.join()
    assert ours.buffer.view(torch.uint8).numpy().tobytes() == raw


def test_a_silent_peer_fails_within_the_limit_and_writes_no_more(closing: Closing, scripted: Scripted) -> None:
    parcel = Parcel(7)
    ours = closing(consumer(timeout_s=1.6))
    ours.scheduler.add_item_source(key(1), scripted.source)
    order(ours, 1, 7)
    opened = scripted.open()
    first = scripted.peer
    reason = ours.report().failed_loading[key(1)]
    assert "sent nothing for" in reason or "took too long" in reason
    scripted.peer = first
    scripted.reply(parcel.item(opened.sequence), *parcel.chunks)
    assert ours.scheduler.has_cache_item(key(2)) is False
    assert not ours.buffer.any()


def test_a_peer_that_dawdles_is_cut_off_at_the_limit(closing: Closing, scripted: Scripted) -> None:
    """It says something often enough, but not what is wanted."""
    ours = closing(consumer(timeout_s=0.4))
    ours.scheduler.add_item_source(key(1), scripted.source)
    order(ours, 1, 7)
    scripted.open()
    stop = threading.Event()

    def dawdle() -> None:
        while not stop.wait(0.03):
            scripted.reply(Welcome(1, NAMESPACE, INSTANCE))

    thread = threading.Thread(target=dawdle)
    thread.start()
    reason = ours.report().failed_loading[key(1)]
    stop.set()
    thread.join()
    assert "took too long" in reason


# ---- wrong ----


def pulled(ours: ECSides, scripted: Scripted, parcel: Parcel) -> Open:
    ours.scheduler.add_item_source(key(1), scripted.source)
    order(ours, 1, len(parcel.embeds))
    return scripted.open()


def test_a_damaged_chunk_is_asked_for_again(closing: Closing, scripted: Scripted) -> None:
    parcel = Parcel(2 * CHUNK_BYTES // 24)
    ours = closing(consumer(len(parcel.embeds)))
    opened = pulled(ours, scripted, parcel)
    assert (opened.key, opened.token) == (key(1), TOKEN)
    scripted.reply(parcel.item(opened.sequence), parcel.chunks[0])
    pull = scripted.expect(Pull)
    assert (pull.index, pull.again) == (1, False)
    scripted.chunk(pull, parcel.chunks[1][:-1] + bytes([parcel.chunks[1][-1] ^ 1]))
    pull = scripted.expect(Pull)
    assert (pull.index, pull.again) == (1, True)
    scripted.chunk(pull, parcel.chunks[1])
    assert ours.report().finished_loading == [key(1)]
    assert same_bits(ours.buffer, parcel.embeds)
    assert scripted.expect(Done).key == key(1)


def test_a_chunk_that_stays_damaged_fails_the_load(closing: Closing, scripted: Scripted) -> None:
    parcel = Parcel(2 * CHUNK_BYTES // 24)
    ours = closing(consumer(len(parcel.embeds)))
    opened = pulled(ours, scripted, parcel)
    scripted.reply(parcel.item(opened.sequence), parcel.chunks[0])
    for _ in range(3):
        scripted.chunk(scripted.expect(Pull), bytes(len(parcel.chunks[1])))
    assert "checksum of chunk 1 of the item does not match, 3 times" in ours.report().failed_loading[key(1)]


def test_an_answer_that_was_passed_over_is_asked_for_again(closing: Closing, scripted: Scripted) -> None:
    parcel = Parcel(4 * CHUNK_BYTES // 24)
    ours = closing(consumer(len(parcel.embeds)))
    opened = pulled(ours, scripted, parcel)
    scripted.reply(parcel.item(opened.sequence), parcel.chunks[0])
    pulls = [scripted.expect(Pull) for _ in range(len(parcel.chunks) - 1)]
    for pull in pulls[1:]:
        scripted.chunk(pull, parcel.chunks[pull.index])
    again = scripted.expect(Pull)
    assert again.index == pulls[0].index
    scripted.chunk(again, parcel.chunks[again.index])
    assert ours.report().finished_loading == [key(1)]
    assert same_bits(ours.buffer, parcel.embeds)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": key(2)}, "key of the item"),
        ({"dtype": "bfloat16"}, "dtype of the item is bfloat16, not float32"),
        ({"shape": (6, 7)}, "shape of the item is (6, 7), not (7, 6)"),
        ({"shape": (8, 6)}, "shape of the item is (8, 6), not (7, 6)"),
        ({"checksums": [bytes(16)] * 2}, "number of chunks of the item is 2, not 1"),
        ({"checksums": [bytes(16)]}, "checksum of chunk 0"),
    ],
    ids=lambda changes: str(next(iter(changes))) if isinstance(changes, dict) else "",
)
def test_an_item_that_is_another_one_fails_by_name(
    closing: Closing, scripted: Scripted, changes: dict[str, Any], reason: str
) -> None:
    parcel, ours = Parcel(7), closing(consumer())
    opened = pulled(ours, scripted, parcel)
    scripted.reply(msgspec.structs.replace(parcel.item(opened.sequence), **changes), *parcel.chunks)
    if "checksums" in changes and len(changes["checksums"]) == 1:
        for _ in range(2):
            scripted.chunk(scripted.expect(Pull), parcel.chunks[0])
    assert reason in ours.report().failed_loading[key(1)]
    assert not ours.buffer.any()


@pytest.mark.parametrize("length", [0, 1, 167, 169])
def test_a_chunk_of_another_length_is_never_taken(closing: Closing, scripted: Scripted, length: int) -> None:
    parcel, ours = Parcel(7), closing(consumer())
    opened = pulled(ours, scripted, parcel)
    scripted.reply(parcel.item(opened.sequence), bytes(length))
    for _ in range(2):
        scripted.chunk(scripted.expect(Pull), bytes(length))
    assert f"chunk 0 of the item has {length} bytes" in ours.report().failed_loading[key(1)]
    assert not ours.buffer.any()


PARCEL = Parcel(7)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xc1garbage"], "does not speak our protocol"),
        ([b""], "does not speak our protocol"),
        ([b"\x91" * 60_000], "does not speak our protocol"),
        ([encode(Hello(1, NAMESPACE))], "does not speak our protocol"),
        ([encode(Refused("because"))], "refused: because"),
        ([encode(Welcome(9, NAMESPACE, INSTANCE))], "has version 9"),
        ([encode(Welcome(1, "f" * 64, INSTANCE))], "namespace " + "f" * 64),
        ([encode(Failed(0, "no such thing"))], "no such thing"),
        ([encode(Failed(77, "no such thing"))], "answered what nobody asked"),
        ([encode(Found(0, [True]))], "answered something else"),
        ([encode(Chunk(0, 0)), PARCEL.chunks[0]], "answered something else"),
        ([encode(PARCEL.item(0))], "answered something else"),
        ([encode(PARCEL.item(0)), b"", PARCEL.chunks[0]], "answered something else"),
        ([msgspec.msgpack.encode(["Item", 0, key(1), "float32", [7, 6], []]), b""], "does not speak our protocol"),
        ([msgspec.msgpack.encode(["Item", 0, key(1), "float32", [0, 6], [bytes(16)]])], "does not speak our protocol"),
        ([b"x" * (CHUNK_BYTES + 1)], "was lost"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_an_answer_that_makes_no_sense_fails_and_others_go_on(
    closing: Closing, scripted: Scripted, frames: list[bytes], reason: str
) -> None:
    theirs, ours = closing(encoder()), closing(consumer(timeout_s=2))
    embeds = random_bits(7, 6, torch.float32)
    theirs.save(key(2), embeds)
    ours.scheduler.add_item_source(key(2), theirs.scheduler.item_source(key(2)))
    ours.scheduler.add_item_source(key(1), scripted.source)
    order(ours, 1, 7)
    scripted.open()
    scripted.say(*frames)
    if reason == "was lost":  # a line that was up: tried again, and then silent
        reason = "sent nothing"
    assert reason in ours.report().failed_loading[key(1)]
    assert not ours.buffer.any()
    assert ours.load(key(2), 0, 7).finished_loading == [key(2)]
    assert same_bits(ours.buffer[:7], embeds)


@pytest.mark.parametrize("found", [[], [True, True]])
def test_a_look_up_that_is_answered_wrongly_is_a_no(closing: Closing, scripted: Scripted, found: list[bool]) -> None:
    ours = closing(consumer())
    ours.scheduler.add_item_source(key(1), scripted.source)
    assert ours.scheduler.has_cache_item(key(1)) is None
    scripted.welcome()
    ask = scripted.expect(Ask)
    assert ask.items == [(key(1), TOKEN)]
    scripted.reply(Found(ask.sequence, found))
    assert ours.look_up(key(1)) is False
    assert ours.scheduler.take_counters()["lookup_failures"] == 1


def test_another_namespace_is_missing(closing: Closing) -> None:
    theirs = closing(encoder())
    ours = closing(ECSides(ECPeerConnector, {}, ECRole.CONSUMER, namespace="f" * 64))
    theirs.save(key(1), random_bits(7, 6, torch.float32))
    ours.scheduler.add_item_source(key(1), theirs.scheduler.item_source(key(1)))
    assert ours.look_up(key(1)) is False
    reason = ours.load(key(1), 0, 7).failed_loading[key(1)]
    assert NAMESPACE in reason
    assert "f" * 64 in reason
    assert not ours.buffer.any()


def test_a_byte_that_flips_in_the_encoders_memory_is_found_and_the_item_dropped(closing: Closing) -> None:
    theirs, ours = closing(encoder()), closing(consumer(ROWS))
    embeds = random_bits(ROWS, 6, torch.float32)
    theirs.save(key(1), embeds)
    item = theirs.worker._memory.find(key(1))  # type: ignore[attr-defined]
    item._data[5 * CHUNK_BYTES + 17] ^= 1
    ours.scheduler.add_item_source(key(1), theirs.scheduler.item_source(key(1)))
    assert "damaged in the encoder's memory" in ours.load(key(1), 0, ROWS).failed_loading[key(1)]
    theirs.wait_until(lambda: theirs.scheduler.has_cache_item(key(1)) is False)  # it must not believe that it holds it
    assert ours.look_up(key(1)) is False
    assert theirs.save(key(1), embeds).finished_saving == [key(1)]
    assert ours.load(key(1), 0, ROWS).finished_loading == [key(1)]
    assert same_bits(ours.buffer, embeds)


def test_an_engine_that_is_both_finds_its_own_damage(closing: Closing) -> None:
    both = closing(encoder(ECRole.BOTH))
    embeds = random_bits(7, 6, torch.float32)
    both.save(key(1), embeds)
    both.worker._memory.find(key(1))._data[3] ^= 1  # type: ignore[attr-defined]
    assert "checksum" in both.load(key(1), 0, 7).failed_loading[key(1)]
    assert both.look_up(key(1)) is False
    both.save(key(1), embeds)
    assert both.load(key(1), 0, 7).finished_loading == [key(1)]
    both.worker._memory.find(key(1))._data[3] ^= 1  # type: ignore[attr-defined]
    assert both.save(key(1), embeds).finished_saving == [key(1)], "a save repairs what is damaged"
    assert both.load(key(1), 0, 7).finished_loading == [key(1)]
    assert same_bits(both.buffer[:7], embeds)


# ---- hostile ----


def test_garbage_on_the_port_harms_nobody(closing: Closing, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = closing(encoder()), closing(consumer())
    embeds = random_bits(7, 6, torch.float32)
    theirs.save(key(1), embeds)
    source = theirs.scheduler.item_source(key(1))
    address = "/".join(source.split("/")[:3])
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(os.urandom(4096))
    whole = [encode(Open(1, key(1), TOKEN)), encode(Pull(1, key(1), TOKEN, 0)), encode(Hello(1, NAMESPACE))]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = int(DEADLINE_S * 1000)
        dealer.rcvhwm = 10
        dealer.connect(address)
        for frames in (
            [b""],
            [b"", b""],
            [b"\xc1"],
            [b"\x91" * 60_000],
            [os.urandom(1000)] * 50,
            [msgspec.msgpack.encode(["Pull", -1, key(1), TOKEN, 0])],
            [msgspec.msgpack.encode(["Pull", 1, key(1), TOKEN, 2**31])],
            [msgspec.msgpack.encode(["Pull", 1, "../etc/passwd", TOKEN, 0])],
            [msgspec.msgpack.encode(["Open", 1, key(1), "x"])],
            [msgspec.msgpack.encode(["Ask", 1, [[key(1), TOKEN]] * 300])],
            [msgspec.msgpack.encode(["Hello", 1, {"version": "x"}])],
            [msgspec.msgpack.encode(["Nonsense", 1])],
            [encode(Item(1, key(1), "float32", (7, 6), [bytes(16)]))],
            [encode(Done(key(1), TOKEN))],
            *([message[:n]] for message in whole for n in range(len(message))),
            *([os.urandom(n)] for n in range(1, 300)),
            [bytes(MAX_HEADER_BYTES + 1)],  # too long: ZeroMQ ends the connection
        ):
            dealer.send_multipart(frames)
        ours.scheduler.add_item_source(key(1), source)
        assert ours.look_up(key(1)) is True
        assert theirs.worker.num_leased() == 1, "a stranger ended the lease"
        assert ours.load(key(1), 0, 7).finished_loading == [key(1)]
    assert same_bits(ours.buffer[:7], embeds)
    assert caplog.records == [], "strangers could fill the log"


# ---- the end ----


def test_close_in_the_middle_of_pulls_and_look_ups(closing: Closing, scripted: Scripted) -> None:
    ours = closing(consumer(timeout_s=2 * DEADLINE_S, lookup_timeout_s=2 * DEADLINE_S))
    ours.scheduler.add_item_source(key(1), scripted.source)
    assert ours.scheduler.has_cache_item(key(1)) is None
    order(ours, 1, 7)
    asked: set[type[Request]] = set()
    while asked != {Ask, Open}:  # the two sides have a connection each
        request = scripted.expect(Hello, Ask, Open)
        if isinstance(request, Hello):
            scripted.reply(Welcome(1, NAMESPACE, INSTANCE))
        else:
            asked.add(type(request))
    begin_s = time.monotonic()
    ours.close()
    assert time.monotonic() - begin_s < DEADLINE_S / 2


def test_close_of_an_encoder_in_the_middle_of_pulls(closing: Closing) -> None:
    theirs, ours = closing(encoder()), closing(consumer(ROWS, timeout_s=1))
    theirs.save(key(1), random_bits(ROWS, 6, torch.float32))
    ours.scheduler.add_item_source(key(1), theirs.scheduler.item_source(key(1)))
    order(ours, 1, ROWS)
    begin_s = time.monotonic()
    theirs.close()
    assert time.monotonic() - begin_s < DEADLINE_S / 2
    output = ours.report()
    assert output.finished_loading or output.failed_loading


def test_sockets_and_descriptors_are_given_back(closing: Closing) -> None:
    def use() -> None:
        theirs, ours = encoder(), consumer()
        theirs.save(key(1), random_bits(7, 6, torch.float32))
        ours.scheduler.add_item_source(key(1), theirs.scheduler.item_source(key(1)))
        assert ours.look_up(key(1)) is True
        assert ours.load(key(1), 0, 7).finished_loading == [key(1)]
        theirs.close()
        ours.close()

    use()  # what the libraries open once stays open
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        use()
    assert len(os.listdir("/proc/self/fd")) <= before
