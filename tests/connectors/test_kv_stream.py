"""Messages over a real connection that takes and brings a little at a time, ends early, or carries something else."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from connectors.connections import BrokenError
from connectors.kv.stream import Message, Stream, advance, prefix_of
from connectors.peer_messages import MAX_HEADER_BYTES, MalformedError
from tests.connectors.kv_script import framed, tcp_pair, wait_readable

MAX_BODY_BYTES = 1 << 20
PREFIX_BYTES = len(prefix_of(b"", 0))

Sockets = Callable[..., tuple[socket.socket, socket.socket]]
Ends = Callable[..., tuple[Stream, Stream]]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made: list[socket.socket] = []

    def pair(*, tiny: bool = False) -> tuple[socket.socket, socket.socket]:
        ends = tcp_pair(tiny=tiny)
        made.extend(ends)
        return ends

    yield pair
    for one in made:
        one.close()


@pytest.fixture
def streams(sockets: Sockets) -> Ends:
    """A sender and a receiver."""

    def pair(*, tiny: bool = False) -> tuple[Stream, Stream]:
        one, other = sockets(tiny=tiny)
        return Stream(one, "there", MAX_BODY_BYTES), Stream(other, "here", MAX_BODY_BYTES)

    return pair


def next_message(receiver: Stream, sender: Stream | None = None) -> Message:
    while (message := receiver.receive()) is None:
        if sender is not None:
            sender.flush()
        wait_readable(receiver)
    return message


def fill(receiver: Stream, places: list[memoryview], sender: Stream) -> int:
    """Receive a body; in how many steps."""
    steps = 0
    while places:
        sender.flush()
        num_bytes = receiver.receive_into(places)
        if num_bytes:
            advance(places, num_bytes)
            steps += 1
        else:
            wait_readable(receiver)
    return steps


def cut_up(data: bytes | bytearray, dice: random.Random, longest: int) -> list[memoryview]:
    """All of it, in pieces of any length from one byte to `longest`."""
    whole, pieces, begin = memoryview(data), [], 0
    while begin < len(whole):
        end = begin + dice.randint(1, longest)
        pieces.append(whole[begin:end])
        begin = end
    return pieces


@pytest.mark.parametrize("longest", [1, 700, 100_000])
def test_messages_arrive_whole_and_in_order_over_a_line_that_takes_little(streams: Ends, longest: int) -> None:
    """With pieces of one byte a body has many more than one call can take, or the kernel at once (1024)."""
    dice = random.Random(longest)
    sender, receiver = streams(tiny=True)
    sizes = [3000, 0, 1, 5000] if longest == 1 else [200_000, 0, 1, 150_000]
    bodies = [dice.randbytes(size) for size in sizes]
    headers = [dice.randbytes(size) for size in (40, 0, MAX_HEADER_BYTES, 300)]
    for header, body in zip(headers, bodies, strict=True):
        sender.send(header, cut_up(body, dice, longest))
    assert sender.num_waiting > 1, "the line took all of it at once: the test tests nothing"
    for header, body in zip(headers, bodies, strict=True):
        assert next_message(receiver, sender) == Message(header, len(body))
        arrived = bytearray(len(body))
        steps = fill(receiver, cut_up(arrived, dice, longest), sender)
        assert arrived == body
        assert steps > 1 or len(body) < 2
    assert sender.num_waiting == 0
    assert receiver.receive() is None


def test_a_message_is_understood_wherever_it_is_cut(
    sockets: Sockets,
) -> None:
    line, end = sockets()
    receiver = Stream(end, "here", MAX_BODY_BYTES)
    header, body = b"a header", b"body"
    message = framed(header, body)
    for cut in range(1, len(message)):
        arrived = bytearray(len(body))
        left = [memoryview(arrived)]
        line.sendall(message[:cut])
        wait_readable(end)
        if cut < PREFIX_BYTES + len(header):
            assert receiver.receive() is None
            line.sendall(message[cut:])
        assert next_message(receiver) == Message(header, len(body))
        if cut > PREFIX_BYTES + len(header):
            wait_readable(end)
            assert receiver.receive_into(left) == cut - PREFIX_BYTES - len(header)
            advance(left, cut - PREFIX_BYTES - len(header))
        if cut >= PREFIX_BYTES + len(header):
            assert receiver.receive_into(left) == 0
            line.sendall(message[cut:])
        while left:
            wait_readable(end)
            advance(left, receiver.receive_into(left))
        assert arrived == body


def test_a_body_ends_where_its_message_does(streams: Ends) -> None:
    """What follows is the next message's, also where there is room for more."""
    sender, receiver = streams()
    sender.send(b"one", [memoryview(b"body")])
    sender.send(b"two")
    assert next_message(receiver) == Message(b"one", 4)
    arrived = bytearray(4)
    assert receiver.receive_into([memoryview(arrived)]) == 4
    assert arrived == b"body"
    assert next_message(receiver) == Message(b"two", 0)


def test_a_body_is_read_when_it_is_sent(streams: Ends) -> None:
    """No copy is made of what waits."""
    sender, receiver = streams(tiny=True)
    body = bytearray(500_000)
    sender.send(b"", [memoryview(body)])
    assert sender.num_waiting == 1
    body[-1] = 1
    assert next_message(receiver, sender) == Message(b"", len(body))
    arrived = bytearray(len(body))
    fill(receiver, [memoryview(arrived)], sender)
    assert arrived == body


def test_pieces_without_a_byte_are_passed_over(streams: Ends) -> None:
    sender, receiver = streams()
    empty = memoryview(b"")
    sender.send(b"header", [empty, memoryview(b"bo"), empty, memoryview(b"dy"), empty])
    sender.send(b"next", [empty])
    assert sender.num_waiting == 0
    assert next_message(receiver) == Message(b"header", 4)
    assert receiver.receive_into([memoryview(bytearray(4))]) == 4
    assert next_message(receiver) == Message(b"next", 0)


def test_any_flipped_bit_of_what_goes_before_a_body_is_caught(
    sockets: Sockets,
) -> None:
    header = random.Random(0).randbytes(30)
    message = framed(header, b"body")
    # What a header is waiting for whose length is wrong: no message may come of it either.
    filler = bytes(MAX_HEADER_BYTES // 2 + 64)
    for bit in range(8 * (PREFIX_BYTES + len(header))):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        line, end = sockets()
        line.sendall(damaged + filler)
        with pytest.raises(MalformedError):
            next_message(Stream(end, "here", MAX_BODY_BYTES))
        line.close()
        end.close()


@pytest.mark.parametrize(
    ("header_bytes", "body_bytes"),
    [(MAX_HEADER_BYTES + 1, 0), (0, MAX_BODY_BYTES + 1), (0xFFFFFFFF, 0), (0, 0xFFFFFFFF)],
)
def test_what_is_too_long_is_refused_by_its_lengths(sockets: Sockets, header_bytes: int, body_bytes: int) -> None:
    """Before room is made for it: only the prefix comes."""
    line, end = sockets()
    line.sendall(struct.pack("!IIQ", header_bytes, body_bytes, 0))
    with pytest.raises(MalformedError, match=f"a header of {header_bytes} bytes and a body of {body_bytes}"):
        next_message(Stream(end, "here", MAX_BODY_BYTES))


def test_what_is_as_long_as_it_may_be_comes(sockets: Sockets) -> None:
    line, end = sockets()
    header = bytes(MAX_HEADER_BYTES)
    line.sendall(prefix_of(header, MAX_BODY_BYTES) + header)
    assert next_message(Stream(end, "here", MAX_BODY_BYTES)) == Message(header, MAX_BODY_BYTES)


@pytest.mark.parametrize("num_bytes", [0, 1, PREFIX_BYTES, PREFIX_BYTES + 3])
def test_a_line_that_ends_is_lost(sockets: Sockets, num_bytes: int) -> None:
    """Between messages, in the prefix, after it, in the header."""
    line, end = sockets()
    line.sendall(framed(b"header", b"body")[:num_bytes])
    line.close()
    receiver = Stream(end, "here", MAX_BODY_BYTES)
    with pytest.raises(BrokenError, match="the connection to here was lost: the other end closed it") as caught:
        next_message(receiver)
    assert caught.value.was_up


@pytest.mark.parametrize("num_body_bytes", [0, 2])
def test_a_line_that_ends_within_a_body_is_lost(sockets: Sockets, num_body_bytes: int) -> None:
    line, end = sockets()
    line.sendall(framed(b"header", b"body")[: PREFIX_BYTES + len(b"header") + num_body_bytes])
    line.close()
    receiver, places = Stream(end, "here", MAX_BODY_BYTES), [memoryview(bytearray(4))]
    assert next_message(receiver) == Message(b"header", 4)
    if num_body_bytes:
        assert receiver.receive_into(places) == num_body_bytes
    wait_readable(end)
    with pytest.raises(BrokenError, match="the connection to here was lost: the other end closed it") as caught:
        receiver.receive_into(places)
    assert caught.value.was_up


def test_a_line_that_is_reset_is_lost_to_who_receives_and_who_sends(
    sockets: Sockets,
) -> None:
    line, end = sockets()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()
    wait_readable(end)
    stream = Stream(end, "here", MAX_BODY_BYTES)
    with pytest.raises(BrokenError, match=r"here was lost: .*Connection reset by peer") as caught:
        stream.receive()
    assert caught.value.was_up
    with pytest.raises(BrokenError, match=r"here was lost: .*Broken pipe"):
        stream.send(b"header")


def test_what_waits_is_lost_with_close(streams: Ends) -> None:
    sender, _ = streams(tiny=True)
    sender.send(b"", [memoryview(bytes(500_000))])
    assert sender.num_waiting
    sender.close()
    sender.close()
    assert (sender.num_waiting, sender.fileno()) == (0, -1)


def test_a_peer_that_vanishes_without_a_word_is_noticed(
    sockets: Sockets,
) -> None:
    """The kernel does that, if it is told to: whether we wait for the peer or it for us."""
    for connected in sockets():
        stream = Stream(connected, "peer", 0)
        assert not connected.getblocking()
        option = connected.getsockopt
        idle_s, interval_s, count = (
            option(socket.IPPROTO_TCP, each) for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle_s + interval_s * count <= 30
        assert 0 < option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
        assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        stream.close()


def test_advance_takes_away_what_was_sent_and_nothing_else() -> None:
    data = memoryview(b"abcdef")
    for num_bytes in range(len(data) + 1):
        pieces = [data[:3], data[3:4], data[4:]]
        advance(pieces, num_bytes)
        assert b"".join(pieces) == data[num_bytes:]
        assert all(len(piece) for piece in pieces)
        assert len(pieces) == sum(num_bytes < end for end in (3, 4, 6))
