"""The producer's end: consumers that take nothing away, too many of them, no descriptor for them, a slow line."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from connectors.kv import consumers, server
from connectors.kv.checksums import LeasedChecksums
from connectors.kv.consumers import Consumer, Consumers
from connectors.kv.leases import LeaseTable
from connectors.kv.rows import BlockRows
from connectors.kv.wire import (
    WIRE_VERSION,
    Ack,
    Failed,
    HandleParams,
    Hello,
    Pull,
    Release,
    Renew,
    Rows,
    Welcome,
    decode_reply,
    encode,
)
from core.types import KVHandle, KVRole
from tests.connectors.kv_script import Raw, framed, wait_readable
from tests.connectors.lossy_proxy import LossyProxy
from tests.connectors.support import DEADLINE_S, LAYOUT, KVPair, num_parked, poll_until, same_bits, with_params

Closing = Callable[[KVPair], KVPair]

#: 256 KiB a block.
LARGE = msgspec.structs.replace(LAYOUT, num_layers=8, head_dim=1024, num_kv_heads=2)
RECEIVE_BYTES = 4096
#: No two of them are neighbours: each is a piece of its own.
BLOCK_IDS = [14, 12, 10, 8, 6, 4, 2, 0]


@pytest.fixture
def prefill(closing: Closing) -> KVPair:
    return closing(KVPair(KVRole.PRODUCER, same_host="never"))


def connected(prefill: KVPair) -> list[Consumer]:
    assert prefill.worker._server is not None
    return list(prefill.worker._server._consumers._open.values())


def pull_of(handle: KVHandle, sequence: int, count: int) -> bytes:
    params = msgspec.msgpack.decode(handle.params, type=HandleParams)
    return encode(Pull(sequence, params.request_id, params.token, 0, count, mapped=False))


def test_a_consumer_that_takes_nothing_away_costs_little_and_holds_up_nobody(closing: Closing) -> None:
    """What it asks for waits until it takes its answer; then it gets them all."""
    prefill = closing(KVPair(KVRole.PRODUCER, LARGE, same_host="never"))
    decode = closing(KVPair(KVRole.CONSUMER, LARGE))
    handle, num_pulls = prefill.lease("slow", BLOCK_IDS), 12
    with Raw.to(prefill.address, receive_bytes=RECEIVE_BYTES) as slow:
        slow.throw(b"".join(framed(pull_of(handle, n, len(BLOCK_IDS))) for n in range(num_pulls)))
        poll_until(lambda: any(consumer.stream.num_waiting for consumer in connected(prefill)))
        [consumer] = connected(prefill)
        for n in range(2):
            decode.pull(f"d{n}", prefill.lease(f"r{n}", BLOCK_IDS), list(range(8)))
            output = decode.report()
            assert (output.finished_recving, output.num_retries) == ([f"d{n}"], 0)
            assert 0 < consumer.stream.num_waiting <= len(BLOCK_IDS), "more than one answer waits"
        expected = prefill.blocks[BLOCK_IDS].view(torch.uint8).numpy().tobytes()
        for n in range(num_pulls):
            header, body = slow.hear()
            answer = decode_reply(header)
            assert isinstance(answer, Rows)
            assert answer.sequence == n
            assert body == expected
    assert same_bits(decode.blocks[:8], prefill.blocks[BLOCK_IDS])
    poll_until(lambda: len(connected(prefill)) == 1)


def test_a_consumer_that_goes_while_its_answer_waits_is_forgotten(closing: Closing) -> None:
    prefill = closing(KVPair(KVRole.PRODUCER, LARGE, same_host="never"))
    handle = prefill.lease("r", BLOCK_IDS)
    with Raw.to(prefill.address, receive_bytes=RECEIVE_BYTES) as slow:
        slow.throw(b"".join(framed(pull_of(handle, n, len(BLOCK_IDS))) for n in range(8)))
        poll_until(lambda: any(consumer.stream.num_waiting for consumer in connected(prefill)))
    poll_until(lambda: connected(prefill) == [])


def test_a_poll_ends_only_when_there_is_something_to_do() -> None:
    """Neither a consumer that is silent, nor one that has said half of something, nor one that does not take its
    answer away keeps the server's thread busy; what the last one says is heard all the same."""
    ours, poller = Consumers("127.0.0.1", 0), select.poll()
    ours.register(poller)

    def ready(timeout_s: float = DEADLINE_S) -> list[int]:
        return [descriptor for descriptor, _ in poller.poll(timeout_s * 1000)]

    with contextlib.closing(ours), Raw.to(f"tcp://127.0.0.1:{ours.port}", receive_bytes=RECEIVE_BYTES) as raw:
        assert list(ours.messages(ready())) == []
        assert ready(0) == []
        message = framed(b"a question")
        raw.throw(message[:-1])
        assert list(ours.messages(ready())) == []
        assert ready(0) == []
        raw.throw(message[-1:])
        [(consumer, header)] = ours.messages(ready())
        assert header == b"a question"
        body = bytes(16 << 20)
        ours.send(consumer, b"an answer", [memoryview(body)])
        assert consumer.stream.num_waiting
        raw.throw(message)
        heard: list[tuple[bytes, bytes]] = []
        headers: list[bytes] = []

        def is_quiet() -> bool:  # once the system has taken all that it takes
            found = ready(0)
            headers.extend(header for _, header in ours.messages(found))
            return bool(headers) and not found

        poll_until(is_quiet)
        assert headers == [b"a question"]
        assert consumer.stream.num_waiting
        reader = threading.Thread(target=lambda: heard.append(raw.hear()))
        reader.start()
        while consumer.stream.num_waiting:
            assert list(ours.messages(ready())) == []
        reader.join(DEADLINE_S)
        assert heard == [(b"an answer", body)]
        assert ready(0) == []


def test_what_was_put_aside_has_its_turn_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has too much put aside is not listened to until there is room again; nothing is lost, and the order kept."""
    monkeypatch.setattr(consumers, "_MAX_ASIDE", 3)
    ours, poller = Consumers("127.0.0.1", 0), select.poll()
    ours.register(poller)
    heard: list[bytes] = []
    served: list[bytes] = []

    def turn(timeout_s: float = DEADLINE_S) -> bool:
        found = [descriptor for descriptor, _ in poller.poll(timeout_s * 1000)]
        for consumer, header in ours.messages(found):
            if consumer.stream.num_waiting:
                heard.append(header)
                consumer.aside.append(header)
            else:
                served.append(header)
        return bool(found)

    questions = [f"question {n}".encode() for n in range(8)]
    with contextlib.closing(ours), Raw.to(f"tcp://127.0.0.1:{ours.port}", receive_bytes=RECEIVE_BYTES) as raw:
        assert turn()
        [consumer] = ours._open.values()
        body = bytes(16 << 20)
        ours.send(consumer, b"an answer", [memoryview(body)])
        raw.throw(b"".join(map(framed, questions)))
        poll_until(lambda: not turn(0) and len(heard) == 3)
        assert (list(consumer.aside), served) == (questions[:3], [])
        reader = threading.Thread(target=raw.hear)
        reader.start()
        while len(served) < len(questions):
            assert turn()
        reader.join(DEADLINE_S)
        assert (heard, served) == (questions[:3], questions)
        assert not turn(0)


def test_what_was_put_aside_comes_before_what_came_after_it() -> None:
    """Also where the line becomes free in the midst of what has come: by another answer that was sent."""
    ours, poller = Consumers("127.0.0.1", 0), select.poll()
    ours.register(poller)
    served: list[bytes] = []
    with contextlib.closing(ours), Raw.to(f"tcp://127.0.0.1:{ours.port}", receive_bytes=RECEIVE_BYTES) as raw:
        assert poller.poll(DEADLINE_S * 1000)
        assert list(ours.messages({descriptor for descriptor, _ in poller.poll(0)})) == []
        [consumer] = ours._open.values()
        ours.send(consumer, b"an answer", [memoryview(bytes(16 << 20))])
        raw.throw(b"".join(map(framed, [b"first", b"free the line", b"second"])))
        wait_readable(consumer.stream)
        reader = threading.Thread(target=raw.hear)
        for _, header in ours.messages({consumer.stream.fileno()}):
            if header == b"free the line":
                reader.start()
                poll_until(lambda: consumer.stream.flush() >= 0 and not consumer.stream.num_waiting)
            elif consumer.stream.num_waiting:
                consumer.aside.append(header)
            else:
                served.append(header)
        reader.join(DEADLINE_S)
    assert served == [b"first", b"second"]


def test_what_one_said_before_it_went_is_heard_after_its_connection_broke() -> None:
    ours, poller = Consumers("127.0.0.1", 0), select.poll()
    ours.register(poller)
    with contextlib.closing(ours), Raw.to(f"tcp://127.0.0.1:{ours.port}", receive_bytes=RECEIVE_BYTES) as raw:
        assert poller.poll(DEADLINE_S * 1000)
        assert list(ours.messages({descriptor for descriptor, _ in poller.poll(0)})) == []
        [consumer] = ours._open.values()
        ours.send(consumer, b"an answer", [memoryview(bytes(16 << 20))])
        raw.throw(framed(b"last") + framed(b"words"))
        raw.close()
        poll_until(lambda: any(events & select.POLLERR for _, events in poller.poll(0)))
        heard = [header for _, header in ours.messages({consumer.stream.fileno()})]
        assert heard == [b"last", b"words"]
        ours.send(consumer, b"too late")
        assert not ours._open


@pytest.fixture
def slow(closing: Closing) -> Iterator[tuple[KVPair, Raw]]:
    """A producer whose leases last for a second, and a consumer that has asked for large blocks of one of them, and
    does not take them away."""
    prefill = closing(KVPair(KVRole.PRODUCER, LARGE, same_host="never", lease_s=1))
    handle = prefill.lease("slow", BLOCK_IDS)
    with Raw.to(prefill.address, receive_bytes=RECEIVE_BYTES) as raw:
        for n in range(4):
            raw.say(pull_of(handle, n, len(BLOCK_IDS)))
        poll_until(lambda: any(consumer.stream.num_waiting for consumer in connected(prefill)))
        poll_until(lambda: len(connected(prefill)[0].aside) == 3)
        yield prefill, raw


def test_a_lease_is_renewed_while_an_answer_waits(slow: tuple[KVPair, Raw]) -> None:
    """Else the blocks of a slow consumer would be taken from it while it receives them."""
    prefill, raw = slow
    leases = [prefill.lease(name, [1]) for name in ("kept", "left")]
    kept = msgspec.msgpack.decode(leases[0].params, type=HandleParams)
    ended: set[str] = set()
    while ended != {"slow", "left"}:
        raw.say(encode(Renew("kept", kept.token)))
        with contextlib.suppress(AssertionError):  # nothing has ended meanwhile
            ended |= set(prefill.report(0.2).expired_sending)
        assert "kept" not in ended
    assert connected(prefill)[0].stream.num_waiting


@pytest.mark.parametrize("kind", [Ack, Release])
def test_the_last_words_of_one_that_goes_while_its_answer_waits_are_heard(
    slow: tuple[KVPair, Raw], kind: type[Ack | Release]
) -> None:
    """Else what it has got, or does not want, would be kept for it until the lease is over."""
    prefill, raw = slow
    names = [f"r{n}" for n in range(8)]
    tokens = [msgspec.msgpack.decode(prefill.lease(name, [1]).params, type=HandleParams).token for name in names]
    for name, token in zip(names, tokens, strict=True):
        raw.say(encode(kind(name, token)))
    raw.close()
    ended: list[str] = []

    def all_ended() -> bool:
        output = prefill.worker.get_finished()
        ended.extend(output.finished_sending)
        assert not set(output.expired_sending) & set(names)
        return set(names) <= set(ended)

    prefill.bell.wait_for(all_ended)
    poll_until(lambda: connected(prefill) == [])


def test_an_error_of_one_request_that_had_to_wait_ends_that_one(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER, same_host="never"))
    handle = prefill.scheduler.request_finished("r", [4, 5], 8)
    decode.pull("d", handle, [0, 1])
    poll_until(lambda: num_parked(prefill) == 1)
    with monkeypatch.context() as patch:
        patch.setattr(LeasedChecksums, "take", lambda *_: 1 / 0)
        prefill.step()
        assert decode.report().failed_recving == {"d": f"{prefill.address}: internal error of the producer"}
    assert "a request for KV blocks failed" in caplog.text
    decode.pull("e", prefill.lease("s", [4, 5]), [0, 1])
    assert decode.report().finished_recving == ["e"]


def test_checksums_that_cannot_be_taken_ahead_are_taken_when_they_are_asked_for(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER, same_host="never"))
    with monkeypatch.context() as patch:
        patch.setattr(BlockRows, "gather", lambda *_: 1 / 0)
        handle = prefill.lease("r", [4, 5])
        poll_until(lambda: "cannot be taken ahead" in caplog.text)
    decode.pull("d", handle, [0, 1])
    output = decode.report()
    assert (output.finished_recving, output.num_retries) == (["d"], 0)


def test_one_consumer_cannot_take_all_places_for_early_requests(prefill: KVPair) -> None:
    with Raw.to(prefill.address) as stranger:
        for n in range(server._MAX_PARKED_PULLS + 5):
            stranger.say(encode(Pull(n, f"unknown {n}", "0" * 32, 0, 1, mapped=False)))
        refused = [decode_reply(stranger.hear()[0]) for _ in range(5)]
        assert all(isinstance(answer, Failed) and "lease unknown" in answer.reason for answer in refused)
        assert num_parked(prefill) == server._MAX_PARKED_PULLS
    poll_until(lambda: num_parked(prefill) == 0)


def test_one_that_says_much_does_not_keep_others_waiting(prefill: KVPair) -> None:
    """So many messages of one are taken, then others have their turn; none is lost."""
    num_asked = 10 * consumers._BATCH
    handle = prefill.lease("r", [1])
    with Raw.to(prefill.address) as eager, Raw.to(prefill.address) as other:
        eager.throw(b"".join(framed(pull_of(handle, n, 1)) for n in range(num_asked)))
        assert other.is_served()
        answers = [decode_reply(eager.hear()[0]) for _ in range(num_asked)]
    assert [answer.sequence for answer in answers if isinstance(answer, Rows)] == list(range(num_asked))


def test_the_one_that_was_silent_for_longest_goes_when_there_are_too_many(
    prefill: KVPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "_MAX_CONSUMERS", 3)
    with contextlib.ExitStack() as stack:
        first, second, third = [stack.enter_context(Raw.to(prefill.address)) for _ in range(3)]
        assert all(each.is_served() for each in (first, second, third, first))
        fourth = stack.enter_context(Raw.to(prefill.address))
        assert fourth.is_served()
        assert second.has_ended()
        assert len(connected(prefill)) == 3
        assert all(each.is_served() for each in (third, first, fourth))
        again = stack.enter_context(Raw.to(prefill.address))
        assert again.is_served()
        assert third.has_ended()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[list[int]]:
    """For this process. What is closed of those that are yielded, and taken off the list, can be had again."""
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    try:
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


class Newcomer(Raw):
    """Has its descriptor already, and comes when it is told to."""

    def __init__(self, address: str) -> None:
        super().__init__(socket.socket())
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._place = host, int(port)

    def come(self) -> Newcomer:
        self.socket.connect(self._place)
        return self


@pytest.fixture
def newcomers(prefill: KVPair) -> Iterator[list[Newcomer]]:
    with contextlib.ExitStack() as stack:
        made = [Newcomer(prefill.address) for _ in range(4)]
        for each in made:
            stack.enter_context(each)
        yield made


def test_without_a_descriptor_newcomers_wait_and_others_are_served(
    prefill: KVPair, newcomers: list[Newcomer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they have the server's poll end at once, again and again."""
    turns = itertools.count()
    expire = LeaseTable.expire

    def counted(self: LeaseTable, now_s: float) -> bool:
        next(turns)
        return bool(expire(self, now_s))

    with Raw.to(prefill.address) as served:
        assert served.is_served()
        with no_descriptor_left():
            monkeypatch.setattr(LeaseTable, "expire", counted)
            begin_s = time.monotonic()
            for newcomer in newcomers:
                newcomer.come().say(encode(Hello(WIRE_VERSION, LAYOUT)))
            while time.monotonic() < begin_s + 0.5:
                assert served.is_served()
                served.socket.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    served.hear()
                served.socket.settimeout(DEADLINE_S)
            assert len(connected(prefill)) == 1
            assert next(turns) < 40
        assert all(newcomer.hear() == (encode(Welcome(WIRE_VERSION, LAYOUT)), b"") for newcomer in newcomers)
        assert served.is_served()


def test_strangers_do_not_push_out_who_is_served(prefill: KVPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_MAX_CONSUMERS", 3)
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(Raw.to(prefill.address)) for _ in range(2)]
        assert all(each.is_served() for each in ours)
        silent = [stack.enter_context(Raw.to(prefill.address)) for _ in range(6)]
        assert all(each.has_ended() for each in silent[:5])
        assert all(each.is_served() for each in ours)


class SlowLine:
    """So many bytes a chunk, then a rest, in which the line takes nothing more."""

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._never = threading.Event()
        self.num_bytes = 0

    def __call__(self, data: bytes) -> bytes:
        self.num_bytes += len(data)
        self._never.wait(self._rest_s * len(data) / (16 << 10))  # what a slow line does; nothing to wait for
        return data


def test_a_slow_line_costs_time_and_nothing_else(closing: Closing) -> None:
    """Each piece takes half of the time limit, those that are asked for at once take twice as long as it together: a
    piece that waits for others to arrive is not lost, and a producer whose bytes come is not silent."""
    timeout_s = 1.0
    prefill = closing(KVPair(KVRole.PRODUCER, LARGE, same_host="never"))
    decode = closing(KVPair(KVRole.CONSUMER, LARGE, blocks_per_message=1, timeout_s=timeout_s))
    chunks_per_block = prefill.blocks[0].nbytes // (16 << 10)
    line = SlowLine(timeout_s / 2 / chunks_per_block)
    proxy = LossyProxy(int(prefill.address.rpartition(":")[2]), line)
    try:
        theirs = BLOCK_IDS[:6]
        decode.pull("d", with_params(prefill.lease("r", theirs), {"address": proxy.address}), list(range(6)))
        output = decode.report(DEADLINE_S)
        assert prefill.report().finished_sending == ["r"]  # the acknowledgement takes the same line
    finally:
        proxy.close()
    assert (output.finished_recving, output.num_retries) == (["d"], 0)
    assert output.seconds_receiving[0] > 2.5 * timeout_s, "the line was not slow: the test tests nothing"
    assert line.num_bytes < 1.01 * prefill.blocks[theirs].nbytes, "something was sent twice"
    assert same_bits(decode.blocks[:6], prefill.blocks[theirs])
