"""KVPeerConnector against messages that are damaged, cut short, of another length, or none of ours: what is wrong never
counts as a block, and costs its own connection at most."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec
import pytest

from connectors.kv import server
from connectors.kv.stream import prefix_of
from connectors.kv.wire import WIRE_VERSION, Hello, Pull, Release, Rows, Welcome, encode
from connectors.peer_messages import MAX_HEADER_BYTES
from core.types import KVHandle, KVRole
from tests.connectors.kv_script import Raw, Scripted, bytes_of, framed, nonsense, row, rows_message
from tests.connectors.support import LAYOUT, KVPair, same_bits, with_params

Closing = Callable[[KVPair], KVPair]


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


def test_a_damaged_message_is_asked_for_again(scripted: Scripted, handle: KVHandle, decode: KVPair) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    pull = scripted.welcome()
    header, *rows = rows_message(pull, 1, 2, 3, 4)
    scripted.say(header, *rows[:2], row(9), rows[3])
    again = scripted.expect(Pull)
    assert (again.first, again.count) == (pull.first, pull.count)
    output = decode.worker.get_finished()
    assert not output, "blocks were handed over whose checksum is wrong"
    scripted.say(*rows_message(again, 1, 2, 3, 4))
    output = decode.report()
    assert output.finished_recving == ["d"]
    assert output.num_retries == 1
    assert bytes_of(decode, 4) == b"".join(rows)
    assert not decode.blocks[4:].any(), "a damaged message went where nothing was ordered"


def test_a_message_whose_checksum_is_wrong_every_time_fails(
    scripted: Scripted, handle: KVHandle, decode: KVPair
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    pull = scripted.welcome()
    for attempt in range(4):
        header, *rows = rows_message(pull, 1, 2, 3, 4)
        scripted.say(header, row(9), *rows[1:])
        if attempt < 3:
            pull = scripted.expect(Pull)
    output = decode.report()
    assert "the checksum of blocks 0 to 4 does not match" in output.failed_recving["d"]
    assert output.num_retries == 3
    assert not decode.blocks[4:].any()
    assert scripted.expect(Release).lease == "r"


@pytest.mark.parametrize("wrong", ["one too many", "one too few", "cut short", "a byte too long", "no rows"])
def test_a_body_of_another_length_costs_the_connection_and_the_pull_after_a_few(
    scripted: Scripted, handle: KVHandle, decode: KVPair, wrong: str
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    for _ in range(4):
        header, *rows = rows_message(scripted.welcome(), 1, 2, 3, 4)
        body = {
            "one too many": [*rows, row(5)],
            "one too few": rows[:3],
            "cut short": [*rows[:3], rows[3][:-1]],
            "a byte too long": [*rows, b"x"],
            "no rows": [],
        }[wrong]
        scripted.throw(framed(header, *body))
    output = decode.report()
    num_bytes = len(b"".join(body))
    reason = f"{scripted.address} does not speak our protocol: {num_bytes} bytes came for 4 blocks"
    assert output.failed_recving == {"d": reason}
    assert output.num_retries == 3
    assert not decode.blocks.any(), "something of a body was kept whose length alone is wrong"


def test_a_pull_survives_a_connection_that_ends_within_a_message(
    scripted: Scripted, handle: KVHandle, decode: KVPair
) -> None:
    """In the prefix, in the header, in the body: as often as a connection may be lost."""
    decode.pull("d", handle, [0, 1, 2, 3])
    for end in (7, 20, -1):
        scripted.throw(framed(*rows_message(scripted.welcome(), 9, 9, 9, 9))[:end])
        scripted.hang_up()
    scripted.say(*rows_message(scripted.welcome(), 1, 2, 3, 4))
    output = decode.report()
    assert (output.finished_recving, output.num_retries) == (["d"], 3)
    assert bytes_of(decode, 4) == b"".join(map(row, range(1, 5)))


def _damaged(message: bytes, where: int) -> bytes:
    return message[:where] + bytes([message[where] ^ 1]) + message[where + 1 :]


_HELLO = encode(Hello(WIRE_VERSION, LAYOUT))


_WELCOME = encode(Welcome(WIRE_VERSION, LAYOUT))


_ROWS = encode(Rows(0, bytes(16)))


@pytest.mark.parametrize(
    "thrown",
    [
        pytest.param(framed(b"\xc1garbage"), id="no msgpack"),
        pytest.param(framed(b""), id="empty header"),
        pytest.param(framed(_HELLO), id="a request"),
        pytest.param(framed(b"x" * (4 << 20)), id="header too long"),
        pytest.param(prefix_of(b"x" * (MAX_HEADER_BYTES + 1), 0), id="header one too long"),
        pytest.param(_damaged(framed(_WELCOME), 16), id="header damaged"),
        pytest.param(_damaged(framed(_WELCOME), 15), id="its checksum damaged"),
        pytest.param(prefix_of(_ROWS, (1 << 32) - 1) + _ROWS, id="body too long"),
        pytest.param(framed(_WELCOME, b"x"), id="body without rows"),
        pytest.param(random.Random(0).randbytes(4096), id="garbage"),
    ],
)
def test_nonsense_costs_the_connection_and_the_pull_after_a_few(
    scripted: Scripted, handle: KVHandle, decode: KVPair, thrown: bytes
) -> None:
    decode.pull("d", handle, [0, 1, 2, 3])
    for _ in range(4):
        scripted.welcome()
        scripted.throw(thrown)
    output = decode.report()
    assert f"{scripted.address} does not speak our protocol: " in output.failed_recving["d"]
    assert output.num_retries == 3
    assert not decode.blocks.any()


def test_garbage_does_not_kill_the_server(prefill: KVPair, decode: KVPair, caplog: pytest.LogCaptureFixture) -> None:
    """It ends the stranger's own connection, if it cannot be told where it ends, and nobody else's."""
    release = encode(Release("r", "0" * 32))
    with Raw.to(prefill.address) as patient:
        for garbage in (
            random.Random(0).randbytes(4096),
            framed(bytes(MAX_HEADER_BYTES + 1)),
            prefix_of(bytes(MAX_HEADER_BYTES + 1), 0),
            _damaged(framed(release), 3),
            _damaged(framed(release), 16),
            framed(_HELLO, b"a body"),
        ):
            with Raw.to(prefill.address) as stranger:
                stranger.throw(garbage)
                stranger.throw(bytes(64))  # what a damaged length has the producer wait for
                assert stranger.has_ended()
        with Raw.to(prefill.address) as stranger:
            stranger.throw(framed(release)[:-1])
        for header in nonsense():
            patient.say(header)
        assert patient.is_served(), "a message that is framed as it should be cost the connection"
        decode.pull("d", prefill.lease("r", [1]), [0])
        assert decode.report().finished_recving == ["d"]
        assert patient.is_served()
    assert same_bits(decode.blocks[0], prefill.blocks[1])
    assert prefill.report().finished_sending == ["r"]
    assert caplog.records == [], "strangers could fill the log"


def test_requests_for_unknown_leases_are_kept_within_bounds(prefill: KVPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_PARKED", 3)
    with Raw.to(prefill.address) as stranger:
        for n in range(10):
            stranger.say(encode(Pull(n, f"unknown {n}", "0" * 32, 0, 1, mapped=False)))
        answers = [msgspec.msgpack.decode(stranger.hear()[0]) for _ in range(7)]
    assert [answer[:2] for answer in answers] == [["Failed", n] for n in range(3, 10)]
