"""KVPeerConnector against peers that are gone, silent, wrong or hostile."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import pytest
import xxhash
import zmq

from connectors.kv import server
from connectors.kv.wire import (
    MAX_HEADER_BYTES,
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
from core.types import KVHandle, KVRole
from tests.connectors.processes import serve_blocks
from tests.connectors.support import DEADLINE_S, LAYOUT, KVPair, poll_until, same_bits, with_params

Closing = Callable[[KVPair], KVPair]


Kind = TypeVar("Kind", Hello, Pull, Release)


class Scripted:
    """A producer that says what a test wants it to say."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(DEADLINE_S * 1000)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.peer = b""

    def expect(self, kind: type[Kind]) -> Kind:
        self.peer, frame = self.socket.recv_multipart()
        request = decode_request(frame)
        assert isinstance(request, kind), request
        return request

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def welcome(self) -> Pull:
        """Go through the handshake; the first pull."""
        self.expect(Hello)
        self.say(encode(Welcome(1, LAYOUT)))
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
    return with_params(prefill.lease("r", [1, 2, 3, 4]), {"address": scripted.address})


def row(n: int) -> bytes:
    return bytes([n]) * (LAYOUT.elements_per_block * 4)


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def test_a_producer_that_is_gone_fails_at_once_and_is_named(prefill: KVPair, decode: KVPair) -> None:
    handle = prefill.lease("r", [1])
    address = prefill.worker.handshake()
    prefill.close()
    begin_s = time.monotonic()
    decode.pull("d", handle, [0])
    assert decode.report().failed_recving == {"d": f"the connection to {address} could not be made"}
    assert time.monotonic() - begin_s < 2


def test_a_silent_producer_fails_after_the_time_out(closing: Closing, scripted: Scripted, handle: KVHandle) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=0.2))
    decode.pull("d", handle, [0])
    scripted.expect(Hello)
    assert decode.report().failed_recving == {"d": f"{scripted.address} sent nothing for 0.2 s"}
    decode.pull("d2", handle, [0])
    scripted.welcome()
    assert "sent nothing for 0.2 s" in decode.report().failed_recving["d2"]


def test_a_producer_that_is_killed_fails_its_pulls_at_once(closing: Closing) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_blocks, args=(theirs,))
    process.start()
    assert ours.poll(60)
    handle, _ = ours.recv()
    decode = closing(KVPair(KVRole.CONSUMER))
    unordered = with_params(handle, {"request_id": "not ordered yet"})  # such a pull waits at the producer
    decode.pull("d", unordered, [0])
    puller = decode.worker._puller
    assert puller is not None
    poll_until(lambda: any(connection._in_flight for connection in puller._connections.values()))
    process.kill()
    process.join(DEADLINE_S)
    assert "was lost" in decode.report(2).failed_recving["d"]


def test_a_wrong_checksum_fails_and_nothing_of_the_message_is_kept(
    scripted: Scripted, handle: KVHandle, decode: KVPair
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    pull = scripted.welcome()
    rows = [row(n) for n in range(1, 5)]
    checksums = [checksum(data) for data in rows]
    checksums[2] ^= 1
    scripted.say(encode(Rows(pull.sequence, checksums)), *rows)
    assert "checksum of block 2 does not match" in decode.report().failed_recving["d"]
    assert not decode.blocks.any()
    release = scripted.expect(Release)
    assert release.lease == "r"


@pytest.mark.parametrize(
    ("num_rows", "num_checksums", "cut"), [(3, 4, 0), (4, 3, 0), (5, 5, 0), (0, 4, 0), (4, 4, 1), (0, 0, 0)]
)
def test_an_answer_of_another_size_fails(
    scripted: Scripted, handle: KVHandle, decode: KVPair, num_rows: int, num_checksums: int, cut: int
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    pull = scripted.welcome()
    frames = [row(n)[cut:] for n in range(num_rows)]
    scripted.say(encode(Rows(pull.sequence, [checksum(row(n)) for n in range(num_checksums)])), *frames)
    assert "blocks" in decode.report().failed_recving["d"]
    assert not decode.blocks.any()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\xc1garbage", "does not speak our protocol"),
        (b"", "does not speak our protocol"),
        (encode(Hello(1, LAYOUT)), "does not speak our protocol"),
        (encode(Refused("because")), "because"),
        (encode(Rows(77, [])), "an answer of"),
        (encode(Failed(0, "no such thing")), "no such thing"),
        (encode(Welcome(9, LAYOUT)), "wire protocol"),
        (encode(Welcome(1, msgspec.structs.replace(LAYOUT, dtype="int8"))), "dtype=int8"),
        (b"x" * (MAX_HEADER_BYTES + 1), "was lost"),
    ],
)
def test_an_answer_that_makes_no_sense_fails_and_the_next_pull_works(
    scripted: Scripted, handle: KVHandle, prefill: KVPair, decode: KVPair, frame: bytes, reason: str
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    scripted.welcome()
    scripted.say(frame)
    assert reason in decode.report().failed_recving["d"]
    decode.pull("e", prefill.lease("s", [5]), [6])
    assert decode.report().finished_recving == ["e"]
    assert same_bits(decode.blocks[6], prefill.blocks[5])


def test_an_answer_that_is_passed_over_fails_its_pull(closing: Closing, scripted: Scripted, handle: KVHandle) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, blocks_per_message=1))
    decode.pull("d", handle, [0, 1, 2, 3])
    first = scripted.welcome()
    second = scripted.expect(Pull)
    assert (first.first, second.first) == (0, 1)
    scripted.say(encode(Rows(second.sequence, [checksum(row(2))])), row(2))
    assert "was lost" in decode.report().failed_recving["d"]


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
        rows = [row(7), row(7)]
        scripted.say(encode(Rows(pull.sequence, [checksum(r) for r in rows])), *rows)
    decode.pull("e", handle, [9])
    third = scripted.expect(Pull)
    scripted.say(encode(Rows(third.sequence, [checksum(row(8))])), row(8))
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
    host, port = prefill.worker.handshake().removeprefix("tcp://").split(":")
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
            [msgspec.msgpack.encode(["Pull", -1, "r", token, 0, 1])],
            [msgspec.msgpack.encode(["Pull", 1, "r", token, 0, 2**31])],
            [msgspec.msgpack.encode(["Pull", 1, "r" * 5000, token, 0, 1])],
            [msgspec.msgpack.encode(["Pull", 1])],
            [msgspec.msgpack.encode(["Hello", 1, {"version": "x"}])],
            [msgspec.msgpack.encode(["Nonsense", 1])],
            [msgspec.msgpack.encode({"Pull": 1})],
            [encode(Welcome(1, LAYOUT))],
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
        dealer.connect(prefill.worker.handshake())
        for n in range(10):
            dealer.send(encode(Pull(n, f"unknown {n}", "0" * 32, 0, 1)))
        answers = [msgspec.msgpack.decode(dealer.recv()) for _ in range(7)]
    assert [answer[:2] for answer in answers] == [["Failed", n] for n in range(3, 10)]


def test_close_while_a_pull_hangs(closing: Closing, scripted: Scripted, handle: KVHandle) -> None:
    decode = closing(KVPair(KVRole.CONSUMER))
    decode.pull("d", handle, [0])
    scripted.welcome()
    begin_s = time.monotonic()
    decode.close()
    assert time.monotonic() - begin_s < 1
