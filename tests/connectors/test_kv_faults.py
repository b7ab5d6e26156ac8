"""KVPeerConnector against peers that are gone, silent, wrong or hostile."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import pytest
import torch
import xxhash
import zmq

from connectors.kv import server
from connectors.kv.wire import (
    WIRE_VERSION,
    Ack,
    Failed,
    Hello,
    Pull,
    Refused,
    Release,
    Rows,
    Welcome,
    decode_request,
    encode,
)
from connectors.peer_messages import MAX_HEADER_BYTES
from core.types import KVHandle, KVRole
from tests.connectors.processes import serve_blocks
from tests.connectors.support import DEADLINE_S, LAYOUT, KVPair, poll_until, same_bits, with_params

Closing = Callable[[KVPair], KVPair]


Kind = TypeVar("Kind", Ack, Hello, Pull, Release)


class Scripted:
    """A producer that says what a test wants it to say."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(DEADLINE_S * 1000)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.peer = b""

    def expect(self, *kinds: type[Kind]) -> Kind:
        self.peer, frame = self.socket.recv_multipart()
        request = decode_request(frame)
        assert isinstance(request, kinds), request
        return request

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def welcome(self) -> Pull:
        """Go through the handshake; the first pull."""
        self.expect(Hello)
        self.say(encode(Welcome(WIRE_VERSION, LAYOUT)))
        return self.expect(Pull)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    peer = Scripted()
    yield peer
    peer.close()


@pytest.fixture
def prefill(closing: Closing) -> KVPair:
    return closing(KVPair(KVRole.PRODUCER))


@pytest.fixture
def decode(closing: Closing) -> KVPair:
    return closing(KVPair(KVRole.CONSUMER))


@pytest.fixture
def handle(prefill: KVPair, scripted: Scripted) -> KVHandle:
    """A handle of four blocks that leads to the scripted producer."""
    return with_params(prefill.lease("r", [1, 2, 3, 4]), {"address": scripted.address, "segment": ""})


def row(n: int) -> bytes:
    return bytes([n]) * (LAYOUT.elements_per_block * 4)


def rows_message(pull: Pull, *numbers: int) -> list[bytes]:
    """An answer with rows that hold these numbers."""
    rows = [row(n) for n in numbers]
    return [encode(Rows(pull.sequence, xxhash.xxh3_128_digest(b"".join(rows)))), *rows]


def test_a_producer_that_is_gone_fails_at_once_and_is_named(closing: Closing, prefill: KVPair) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=2 * DEADLINE_S))
    handle = prefill.lease("r", [1])
    address = prefill.address
    prefill.close()
    decode.pull("d", handle, [0])
    assert decode.report().failed_recving == {"d": f"the connection to {address} could not be made"}


def test_a_silent_producer_fails_after_the_time_out(closing: Closing, scripted: Scripted, handle: KVHandle) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=1))
    decode.pull("d", handle, [0])
    scripted.expect(Hello)
    scripted.expect(Hello)  # over a new connection, after half of the time
    assert decode.report().failed_recving == {"d": f"{scripted.address} sent nothing for 1 s"}
    decode.pull("d2", handle, [0])
    scripted.welcome()
    scripted.expect(Hello)
    assert "sent nothing for 1 s" in decode.report().failed_recving["d2"]


def test_a_producer_that_is_killed_fails_its_pulls_at_once(closing: Closing) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_blocks, args=(theirs,))
    process.start()
    assert ours.poll(200)
    handle, _ = ours.recv()
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=2 * DEADLINE_S))
    unordered = with_params(handle, {"request_id": "not ordered yet"})  # such a pull waits at the producer
    decode.pull("d", unordered, [0])
    puller = decode.worker._puller
    assert puller is not None
    poll_until(lambda: any(connection._in_flight for connection in puller._connections))
    process.kill()
    process.join(DEADLINE_S)
    assert "was lost" in decode.report().failed_recving["d"]


def test_a_damaged_message_is_asked_for_again(scripted: Scripted, handle: KVHandle, decode: KVPair) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    pull = scripted.welcome()
    header, *rows = rows_message(pull, 1, 2, 3, 4)
    scripted.say(header, *rows[:2], row(9), rows[3])
    again = scripted.expect(Pull)
    assert (again.first, again.count) == (pull.first, pull.count)
    assert not decode.blocks.any(), "something of a damaged message was kept"
    scripted.say(*rows_message(again, 1, 2, 3, 4))
    output = decode.report()
    assert output.finished_recving == ["d"]
    assert output.num_retries == 1
    assert decode.blocks[:4].view(torch.uint8).numpy().tobytes() == b"".join(rows)


@pytest.mark.parametrize("wrong", ["checksum", "one too many", "one too few", "cut short", "empty frame", "no frames"])
def test_a_message_that_is_damaged_every_time_fails(
    scripted: Scripted, handle: KVHandle, decode: KVPair, wrong: str
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    pull = scripted.welcome()
    for attempt in range(4):
        header, *rows = rows_message(pull, 1, 2, 3, 4)
        frames = {
            "checksum": [row(9), *rows[1:]],
            "one too many": [*rows, row(5)],
            "one too few": rows[:3],
            "cut short": [*rows[:3], rows[3][:-1]],
            "empty frame": [*rows, b""],
            "no frames": [],
        }[wrong]
        scripted.say(header, *frames)
        if attempt < 3:
            pull = scripted.expect(Pull)
    output = decode.report()
    assert "blocks" in output.failed_recving["d"]
    assert output.num_retries == 3
    assert not decode.blocks.any()
    assert scripted.expect(Release).lease == "r"


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (encode(Refused("because")), "because"),
        (encode(Failed(0, "no such thing", given_up=False)), "no such thing"),
        (encode(Welcome(9, LAYOUT)), "wire protocol"),
        (encode(Welcome(WIRE_VERSION, msgspec.structs.replace(LAYOUT, dtype="int8"))), "dtype=int8"),
    ],
)
def test_a_refusal_fails_at_once_and_the_next_pull_works(
    scripted: Scripted, handle: KVHandle, prefill: KVPair, decode: KVPair, frame: bytes, reason: str
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    scripted.welcome()
    scripted.say(frame)
    output = decode.report()
    assert reason in output.failed_recving["d"]
    assert output.num_retries == 0
    decode.pull("e", prefill.lease("s", [5]), [6])
    assert decode.report().finished_recving == ["e"]
    assert same_bits(decode.blocks[6], prefill.blocks[5])


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\xc1garbage", "does not speak our protocol"),
        (b"", "does not speak our protocol"),
        (encode(Hello(WIRE_VERSION, LAYOUT)), "does not speak our protocol"),
        (b"x" * (4 << 20), "was lost"),
    ],
)
def test_nonsense_costs_the_connection_and_the_pull_after_a_few(
    scripted: Scripted, handle: KVHandle, decode: KVPair, frame: bytes, reason: str
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    for _ in range(4):
        scripted.welcome()
        scripted.say(frame)
    output = decode.report()
    assert reason in output.failed_recving["d"]
    assert output.num_retries == 3


def test_a_pull_goes_on_over_a_new_connection_with_what_is_missing(
    closing: Closing, scripted: Scripted, handle: KVHandle
) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, blocks_per_message=1))
    decode.pull("d", handle, [0, 1, 2, 3])
    pulls = [scripted.welcome(), *(scripted.expect(Pull) for _ in range(3))]
    scripted.say(*rows_message(pulls[0], 1))
    scripted.say(*rows_message(pulls[1], 2))
    scripted.say(b"\xc1garbage")
    pulls = [scripted.welcome(), scripted.expect(Pull)]
    assert [pull.first for pull in pulls] == [2, 3], "what had come was asked for again, or something was forgotten"
    scripted.say(*rows_message(pulls[0], 3))
    scripted.say(*rows_message(pulls[1], 4))
    output = decode.report()
    assert output.finished_recving == ["d"]
    assert output.num_retries == 1
    assert decode.blocks[:4].view(torch.uint8).numpy().tobytes() == b"".join(map(row, range(1, 5)))


def test_an_answer_that_is_passed_over_is_asked_for_again(
    closing: Closing, scripted: Scripted, handle: KVHandle
) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, blocks_per_message=2))
    decode.pull("d", handle, [0, 1, 2, 3])
    first, second = scripted.welcome(), scripted.expect(Pull)
    assert (first.first, second.first) == (0, 2)
    scripted.say(*rows_message(second, 3, 4))
    again = scripted.expect(Pull)
    assert (again.first, again.count) == (0, 2)
    scripted.say(*rows_message(first, 7, 7))  # late, and not wanted any more
    scripted.say(*rows_message(again, 1, 2))
    output = decode.report()
    assert output.finished_recving == ["d"]
    assert output.num_retries == 1
    assert decode.blocks[:4].view(torch.uint8).numpy().tobytes() == b"".join(map(row, range(1, 5)))


def test_an_answer_that_never_comes_is_asked_for_again_while_others_come(
    closing: Closing, scripted: Scripted, handle: KVHandle
) -> None:
    """The first piece of a pull may rightly be late (its lease is not there yet), so only time tells."""
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=1))
    decode.pull("d", handle, [0, 1])
    lost = scripted.welcome()
    again: Pull | None = None
    num_retries = 0
    for n in itertools.count():
        decode.pull(f"e{n}", handle, [4])
        while isinstance(request := scripted.expect(Pull, Ack), Pull):
            if request.count == lost.count:
                again = request
                continue
            scripted.say(*rows_message(request, 1))
            output = decode.report()
            assert output.finished_recving == [f"e{n}"]
            num_retries += output.num_retries
        if again is not None:
            break
    scripted.say(*rows_message(again, 1, 2))
    output = decode.report()
    assert output.finished_recving == ["d"]
    assert num_retries + output.num_retries == 1


def test_blocks_after_a_cancel_are_not_written(closing: Closing, scripted: Scripted, handle: KVHandle) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, blocks_per_message=2))
    decode.pull("d", handle, [0, 1, 2, 3])
    first = scripted.welcome()
    second = scripted.expect(Pull)
    decode.scheduler.cancel_recv("d")
    decode.step()
    assert decode.report().failed_recving == {"d": "cancelled"}
    assert isinstance(scripted.expect(Release), Release)
    for pull in (first, second):
        scripted.say(*rows_message(pull, 7, 7))
    decode.pull("e", handle, [9])
    third = scripted.expect(Pull)
    scripted.say(*rows_message(third, 8))
    assert decode.report().finished_recving == ["e"]
    assert not decode.blocks[:9].any()
    assert decode.blocks[9].any()


def test_a_wrong_token_is_refused_and_ends_nothing(prefill: KVPair, decode: KVPair) -> None:
    handle = prefill.lease("r", [1])
    decode.pull("d", with_params(handle, {"token": "0" * 32}), [0])
    assert "token refused" in decode.report().failed_recving["d"]  # and the release that follows is refused as well
    assert not decode.blocks.any()
    decode.pull("e", handle, [0])
    assert decode.report().finished_recving == ["e"]
    assert prefill.report().finished_sending == ["r"]


def test_an_unknown_lease_fails_after_its_grace(
    prefill: KVPair, decode: KVPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_UNKNOWN_LEASE_GRACE_S", 0.05)
    decode.pull("d", with_params(prefill.lease("r", [1]), {"request_id": "q"}), [0])
    assert "lease unknown" in decode.report().failed_recving["d"]


def test_more_blocks_than_the_lease_has_are_refused_on_both_ends(prefill: KVPair, decode: KVPair) -> None:
    handle = prefill.lease("r", [1, 2])
    decode.pull("d", handle, [0, 1, 2])
    assert "3 blocks ordered of a handle of 2" in decode.report().failed_recving["d"]
    decode.pull("e", with_params(handle, {"num_blocks": 3}), [0, 1, 2])
    assert "blocks 0 to 3 of a lease of 2" in decode.report().failed_recving["e"]


@pytest.mark.parametrize("block_ids", [[16], [-1]])
def test_an_order_outside_the_cache_fails(prefill: KVPair, decode: KVPair, block_ids: list[int]) -> None:
    decode.pull("d", prefill.lease("r", [1]), block_ids)
    assert "not in the cache" in decode.report().failed_recving["d"]


def test_garbage_does_not_kill_the_server(prefill: KVPair, decode: KVPair, caplog: pytest.LogCaptureFixture) -> None:
    host, port = prefill.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(os.urandom(4096))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = int(DEADLINE_S * 1000)
        dealer.connect(f"tcp://{host}:{port}")
        token = "0" * 32
        for frames in (
            [b""],
            [b"", b""],
            [b"\xc1"],
            [b"\x91" * 60_000],
            [os.urandom(1000)] * 50,
            [msgspec.msgpack.encode(["Pull", -1, "r", token, 0, 1, False])],
            [msgspec.msgpack.encode(["Pull", 1, "r", token, 0, 2**31, False])],
            [msgspec.msgpack.encode(["Pull", 1, "r" * 5000, token, 0, 1, False])],
            [msgspec.msgpack.encode(["Pull", 1])],
            [msgspec.msgpack.encode(["Hello", 1, {"version": "x"}])],
            [msgspec.msgpack.encode(["Nonsense", 1])],
            [msgspec.msgpack.encode({"Pull": 1})],
            [encode(Welcome(WIRE_VERSION, LAYOUT))],
            [bytes(MAX_HEADER_BYTES + 1)],  # too long: ZeroMQ ends the connection
        ):
            dealer.send_multipart(frames)
        decode.pull("d", prefill.lease("r", [1]), [0])
        assert decode.report().finished_recving == ["d"]
    assert same_bits(decode.blocks[0], prefill.blocks[1])
    assert prefill.report().finished_sending == ["r"]
    assert caplog.records == [], "strangers could fill the log"


def test_requests_for_unknown_leases_are_kept_within_bounds(prefill: KVPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_PARKED", 3)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(DEADLINE_S * 1000)
        dealer.connect(prefill.address)
        for n in range(10):
            dealer.send(encode(Pull(n, f"unknown {n}", "0" * 32, 0, 1, mapped=False)))
        answers = [msgspec.msgpack.decode(dealer.recv()) for _ in range(7)]
    assert [answer[:2] for answer in answers] == [["Failed", n] for n in range(3, 10)]


def test_close_while_a_pull_hangs(closing: Closing, scripted: Scripted, handle: KVHandle) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=2 * DEADLINE_S))
    decode.pull("d", handle, [0])
    scripted.welcome()
    begin_s = time.monotonic()
    decode.close()
    assert time.monotonic() - begin_s < DEADLINE_S / 2
