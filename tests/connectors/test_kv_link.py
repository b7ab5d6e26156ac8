"""The consumer's end: how a connection is made, or is not, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connectors.connections import BrokenError
from connectors.kv import link as link_module
from connectors.kv.link import Link
from connectors.kv.stream import Message
from tests.connectors.kv_script import Raw, framed
from tests.connectors.support import DEADLINE_S, connector_threads, poll_until

MAX_BODY_BYTES = 1000
TIMEOUT_S = 1.0


class Listener:
    """Somebody who may be connected to; `port`: where."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, 0), family=family)
        self.socket.settimeout(DEADLINE_S)
        self.port: int = self.socket.getsockname()[1]

    def accept(self) -> Raw:
        return Raw(self.socket.accept()[0])


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.socket.close()


@pytest.fixture
def free_port() -> int:
    """One where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@pytest.fixture
def linked() -> Iterator[Callable[[str], Link]]:
    """Links that are closed in the end, and leave no thread."""
    made: list[Link] = []

    def link(address: str) -> Link:
        made.append(Link(address, MAX_BODY_BYTES, TIMEOUT_S))
        return made[-1]

    yield link
    for one in made:
        one.close()
    poll_until(lambda: connector_threads() == [])


def drive(link: Link, *others: socket.socket) -> Message | None:
    """As a puller does, until a message comes or one of the others has something."""
    poller = select.poll()
    for other in others:
        poller.register(other, select.POLLIN)
    try:
        while True:
            link.register(poller)
            ready = {descriptor for descriptor, _ in poller.poll(DEADLINE_S * 1000)}
            assert ready, "nothing happened in time"
            if link.fileno() in ready:
                message = link.receive()
                if message is not None:
                    return message
            if any(other.fileno() in ready for other in others):
                return None
    finally:
        link.unregister(poller)


def drive_until_connected(link: Link, listener: Listener) -> Raw:
    drive(link, listener.socket)
    return listener.accept()


def talk(link: Link, listener: Listener) -> None:
    """What was sent before there was a connection comes first, and answers come back."""
    for n in range(3):
        link.send(b"%d" % n)
    with drive_until_connected(link, listener) as raw:
        raw.say(b"answer", b"body")
        assert drive(link) == Message(b"answer", 4)
        body = bytearray(4)
        assert link.receive_into([memoryview(body)]) == 4
        assert body == b"body"
        link.send(b"3")
        assert [raw.hear() for _ in range(4)] == [(b"%d" % n, b"") for n in range(4)]


def has_v6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


V6 = pytest.param("::1", "[::1]", marks=pytest.mark.skipif(not has_v6(), reason="this machine has no address ::1"))


@pytest.mark.parametrize(("bound", "named"), [("127.0.0.1", "127.0.0.1"), V6])
def test_a_numeric_address_is_connected_to_without_a_thread(
    linked: Callable[[str], Link], bound: str, named: str
) -> None:
    listener = Listener(bound)
    try:
        link = linked(f"tcp://{named}:{listener.port}")
        assert connector_threads() == []
        talk(link, listener)
    finally:
        listener.socket.close()


def test_a_name_is_looked_up_on_another_thread(
    linked: Callable[[str], Link], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may take its time: neither the constructor nor anything else waits for it."""
    may_go_on = threading.Event()
    _look_up_with(monkeypatch, socket.getaddrinfo, may_go_on)
    link = linked(f"tcp://localhost:{listener.port}")
    assert connector_threads() == ["kv-lookup"]
    assert link.receive() is None
    may_go_on.set()
    talk(link, listener)


def _look_up_with(
    monkeypatch: pytest.MonkeyPatch,
    look_up: Callable[..., list[Any]],
    may_go_on: threading.Event | None = None,
) -> None:
    """What the look-up of names, not of numbers, is to do."""
    real = socket.getaddrinfo

    def looked_up(host: str, port: int, **given: Any) -> list[Any]:
        if given.get("flags"):
            return real(host, port, **given)
        assert threading.current_thread().name == "kv-lookup"
        assert may_go_on is None or may_go_on.wait(DEADLINE_S)
        return look_up(host, port, **given)

    monkeypatch.setattr(link_module.socket, "getaddrinfo", looked_up)


def _unknown(*_: object, **__: object) -> list[Any]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("host", "look_up", "reason"),
    [
        ("no-such-host", _unknown, "Name or service not known"),
        ("nothing-known-of-it", lambda *_, **__: [], "it has no address"),
        ("a" * 64, socket.getaddrinfo, "label too long"),
        ("a..b", socket.getaddrinfo, "label empty or too long"),
    ],
    ids=["unknown", "no address", "too long", "empty label"],
)
def test_a_name_that_leads_nowhere_is_named_with_the_reason(
    linked: Callable[[str], Link],
    host: str,
    look_up: Callable[..., list[Any]],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _look_up_with(monkeypatch, look_up)
    link = linked(f"tcp://{host}:1")
    with pytest.raises(BrokenError, match=f"^the connection to tcp://{host}:1 could not be made: .*{reason}") as caught:
        drive(link)
    assert not caught.value.was_up


@pytest.mark.parametrize("port", [65536, 99999])
def test_a_port_that_there_is_not_is_named(port: int) -> None:
    """The system would take it modulo 65536, and connect to somebody else."""
    with pytest.raises(BrokenError, match=f"could not be made: there is no port {port}$"):
        Link(f"tcp://127.0.0.1:{port}", MAX_BODY_BYTES, TIMEOUT_S)


def test_a_refused_connection_was_never_up(linked: Callable[[str], Link], free_port: int) -> None:
    link = linked(f"tcp://127.0.0.1:{free_port}")
    link.send(b"hello")
    with pytest.raises(BrokenError) as caught:
        drive(link)
    assert str(caught.value) == f"the connection to tcp://127.0.0.1:{free_port} could not be made: Connection refused"
    assert not caught.value.was_up


def _place(host: str, port: int) -> tuple[Any, ...]:
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)


def test_all_addresses_of_a_name_are_tried(
    linked: Callable[[str], Link], listener: Listener, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that refuses, one that cannot be used at all, one of a family that there is not, and then a good one."""
    bad = [
        _place("127.0.0.1", free_port),
        _place("255.255.255.255", free_port),
        (999, *_place("127.0.0.1", free_port)[1:]),
    ]
    _look_up_with(monkeypatch, lambda *_, **__: [*bad, _place("127.0.0.1", listener.port)])
    talk(linked("tcp://somewhere:1"), listener)
    _look_up_with(monkeypatch, lambda *_, **__: bad[::-1])
    with pytest.raises(BrokenError, match="tcp://somewhere:1 could not be made: Connection refused"):
        drive(linked("tcp://somewhere:1"))


def test_an_address_that_keeps_silent_is_given_up_for_the_next(
    linked: Callable[[str], Link], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a name has an IPv6 address to which no road leads."""
    with socket.socket() as deaf, contextlib.ExitStack() as stack:
        deaf.bind(("127.0.0.2", 0))
        deaf.listen(0)
        for _ in range(3):  # its queue is full: what comes is dropped
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
        places = [_place(*deaf.getsockname()), _place("127.0.0.1", listener.port)]
        _look_up_with(monkeypatch, lambda *_, **__: places)
        link = linked("tcp://somewhere:1")
        begin_s = time.monotonic()
        poller = select.poll()
        while link.deadline_s is None:
            link.register(poller)
            poller.poll(DEADLINE_S * 1000)
            link.receive()
        link.check_time(begin_s)
        assert link.deadline_s is not None, "it was given up before its time"
        link.unregister(poller)
        link.check_time(link.deadline_s)
        talk(link, listener)


def test_a_connection_that_was_made_and_ends_was_up(linked: Callable[[str], Link], listener: Listener) -> None:
    link = linked(f"tcp://127.0.0.1:{listener.port}")
    drive_until_connected(link, listener).close()
    with pytest.raises(BrokenError, match="was lost: the other end closed it") as caught:
        drive(link)
    assert caught.value.was_up


def _looking_up(link: Link, _listener: Listener) -> None:
    assert connector_threads() == ["kv-lookup"]


def _connecting(link: Link, _listener: Listener) -> None:
    link.send(b"waits")


def _connected(link: Link, listener: Listener) -> None:
    with drive_until_connected(link, listener) as raw:
        raw.say(b"answer")
        drive(link)


def _in_a_body(link: Link, listener: Listener) -> None:
    with drive_until_connected(link, listener) as raw:
        raw.throw(framed(b"answer", b"body")[:-1])
        drive(link)


def _broken(link: Link, listener: Listener) -> None:
    drive_until_connected(link, listener).close()
    with pytest.raises(BrokenError):
        drive(link)


@pytest.mark.parametrize("state", [_looking_up, _connecting, _connected, _in_a_body, _broken])
def test_close_leaves_nothing_behind(
    listener: Listener, state: Callable[[Link, Listener], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    if state is _looking_up:
        _look_up_with(monkeypatch, socket.getaddrinfo, may_go_on)
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    link = Link(
        f"tcp://{'localhost' if state is _looking_up else '127.0.0.1'}:{listener.port}", MAX_BODY_BYTES, TIMEOUT_S
    )
    state(link, listener)
    assert sorted(os.listdir("/proc/self/fd")) != before
    assert link.fileno() >= 0
    link.close()
    link.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert link.fileno() == -1
    may_go_on.set()
    poll_until(lambda: connector_threads() == [])
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_failed_connection_leaves_nothing_behind(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    places = [_place("127.0.0.1", free_port), _place("255.255.255.255", free_port)]
    _look_up_with(monkeypatch, lambda *_, **__: places)
    link = Link("tcp://somewhere:1", MAX_BODY_BYTES, TIMEOUT_S)
    with pytest.raises(BrokenError):
        drive(link)
    link.close()
    poll_until(lambda: connector_threads() == [])
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_only_so_many_messages_wait_for_a_connection(linked: Callable[[str], Link], listener: Listener) -> None:
    link = linked(f"tcp://127.0.0.1:{listener.port}")
    for n in range(link_module._MAX_WAITING):
        assert link.is_busy == (n >= link_module._MAX_WAITING // 2)
        link.send(b"x")
    with pytest.raises(BrokenError, match=f"{link.address} takes nothing any more") as caught:
        link.send(b"x")
    assert caught.value.was_up, "nobody has refused it: another connection may do better"


def test_only_so_many_messages_wait_for_a_producer_that_takes_none(
    linked: Callable[[str], Link], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_MAX_WAITING", 4)
    link = linked(f"tcp://127.0.0.1:{listener.port}")
    with drive_until_connected(link, listener) as raw:
        raw.say(b"welcome")
        drive(link)
        header = bytes(60_000)
        num_sent = 0
        with pytest.raises(BrokenError, match=f"{link.address} takes nothing any more") as caught:  # noqa: PT012
            while num_sent < 10_000:  # more than any system keeps
                link.send(header)
                num_sent += 1
        assert caught.value.was_up
        assert link.is_busy
        assert num_sent > 4


@pytest.mark.parametrize("within_a_body", [False, True])
def test_what_waits_for_a_busy_producer_goes_once_it_listens(
    linked: Callable[[str], Link], listener: Listener, within_a_body: bool
) -> None:
    """Though nothing else is sent, and nothing comes; also where a body is on its way, whose rest takes its time."""
    link = linked(f"tcp://127.0.0.1:{listener.port}")
    with drive_until_connected(link, listener) as raw:
        raw.throw(framed(b"rows", b"body")[:-1] if within_a_body else framed(b"welcome"))
        drive(link)
        header, num_sent = bytes(60_000), 0
        assert link._stream is not None
        while not link._stream.num_waiting:
            link.send(header)
            num_sent += 1
        link.send(b"last")
        heard: list[bytes] = []
        reader = threading.Thread(target=lambda: heard.extend(raw.hear()[0] for _ in range(num_sent + 1)))
        reader.start()
        poller, body = select.poll(), bytearray(4)
        deadline_s = time.monotonic() + DEADLINE_S
        while link._stream.num_waiting:
            link.register(poller)
            assert poller.poll(DEADLINE_S * 1000), "nobody says when the producer takes more"
            assert time.monotonic() < deadline_s, "what waits does not go"
            if within_a_body:
                link.receive_into([memoryview(body)])
            else:
                assert link.receive() is None
        reader.join(DEADLINE_S)
        assert heard == [header] * num_sent + [b"last"]
        link.register(poller)
        ready = poller.poll(0)
        assert ready == [] or within_a_body, "a poll that need not end at once did"
        link.unregister(poller)


def test_a_descriptor_that_goes_from_one_link_to_another_stays_polled(
    linked: Callable[[str], Link], listener: Listener
) -> None:
    """A link on its way to a connection closes one descriptor and opens another, which need not have the same number.
    Another link that is made meanwhile may get the first one's."""
    poller = select.poll()
    lower = os.open(os.devnull, os.O_RDONLY)
    one = linked(f"tcp://localhost:{listener.port}")
    one.register(poller)
    assert poller.poll(DEADLINE_S * 1000)
    number = one.fileno()
    assert lower < number
    os.close(lower)
    one.receive()  # looked up: it connects, over the lowest number that is free
    two = linked(f"tcp://127.0.0.1:{listener.port}")
    assert two.fileno() == number, "the test tests nothing"
    two.register(poller)
    one.register(poller)
    two.register(poller)
    assert number in {descriptor for descriptor, _ in poller.poll(DEADLINE_S * 1000)}
    two.unregister(poller)
    one.unregister(poller)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_out_of_descriptors_is_a_reason_like_another(host: str) -> None:
    """Whoever makes a link expects BrokenError and nothing else."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):  # noqa: PT012
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(BrokenError, match=f"tcp://{host}:1 could not be made: .*{os.strerror(errno.EMFILE)}"):
            Link(f"tcp://{host}:1", MAX_BODY_BYTES, TIMEOUT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    assert connector_threads() == []
