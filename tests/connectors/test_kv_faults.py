"""KVPeerConnector against peers that are gone, silent or wrong. `test_kv_bad_messages.py` has what is no message."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from connectors.kv import connection, server
from connectors.kv.wire import (
    WIRE_VERSION,
    Ack,
    Failed,
    Hello,
    Pull,
    Refused,
    Release,
    Welcome,
    encode,
)
from core.types import KVHandle, KVRole
from tests.connectors.kv_script import Scripted, bytes_of, framed, row, rows_message
from tests.connectors.processes import serve_blocks
from tests.connectors.support import DEADLINE_S, LAYOUT, KVPair, poll_until, same_bits, with_params

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


def test_a_producer_that_is_gone_fails_at_once_and_is_named(closing: Closing, prefill: KVPair) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=2 * DEADLINE_S))
    handle = prefill.lease("r", [1])
    address = prefill.address
    prefill.close()
    decode.pull("d", handle, [0])
    assert decode.report().failed_recving == {"d": f"the connection to {address} could not be made: Connection refused"}


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "127.0.0.1:65536", "no-such-host.invalid"])
def test_an_address_that_leads_nowhere_fails_its_own_pull_alone(
    scripted: Scripted, handle: KVHandle, decode: KVPair, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Handles pass through the front door: an address may be anything that looks like one."""
    real = socket.getaddrinfo

    def looked_up(name: str, *given: Any, **more: Any) -> Any:
        if name == "no-such-host.invalid" and not more.get("flags"):  # no name server is asked by a test
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    decode.pull("d", handle, [0, 1, 2, 3])
    pull = scripted.welcome()
    address = f"tcp://{host}" if ":" in host else f"tcp://{host}:1"
    decode.pull("e", with_params(handle, {"address": address, "request_id": "q"}), [9])
    output = decode.report()
    assert list(output.failed_recving) == ["e"]
    assert f"the connection to {address} could not be made: " in output.failed_recving["e"]
    scripted.say(*rows_message(pull, 1, 2, 3, 4))
    output = decode.report()
    assert (output.finished_recving, output.num_retries) == (["d"], 0)


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


def test_a_producer_that_falls_silent_within_a_body_fails_after_the_time_out(
    closing: Closing, scripted: Scripted, handle: KVHandle
) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=0.5))
    decode.pull("d", handle, [0, 1, 2, 3])
    for _ in range(2):
        pull = scripted.welcome()
        scripted.throw(framed(*rows_message(pull, 1, 2, 3, 4))[:-1])
    assert decode.report().failed_recving == {"d": f"{scripted.address} sent nothing for 0.5 s"}


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
    poll_until(lambda: any(each._in_flight for each in puller._connections))
    process.kill()
    process.join(DEADLINE_S)
    assert "was lost" in decode.report().failed_recving["d"]


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


def test_a_pull_goes_on_over_a_new_connection_with_what_is_missing(
    closing: Closing, scripted: Scripted, handle: KVHandle
) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, blocks_per_message=1))
    decode.pull("d", handle, [0, 1, 2, 3])
    pulls = [scripted.welcome(), *(scripted.expect(Pull) for _ in range(3))]
    scripted.say(*rows_message(pulls[0], 1))
    scripted.say(*rows_message(pulls[1], 2))
    scripted.throw(framed(b"\xc1garbage"))
    pulls = [scripted.welcome(), scripted.expect(Pull)]
    assert [pull.first for pull in pulls] == [2, 3], "what had come was asked for again, or something was forgotten"
    scripted.say(*rows_message(pulls[0], 3))
    scripted.say(*rows_message(pulls[1], 4))
    output = decode.report()
    assert output.finished_recving == ["d"]
    assert output.num_retries == 1
    assert bytes_of(decode, 4) == b"".join(map(row, range(1, 5)))


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
    assert bytes_of(decode, 4) == b"".join(map(row, range(1, 5)))


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


def test_the_rest_of_a_body_after_a_cancel_is_not_written(
    closing: Closing, scripted: Scripted, handle: KVHandle
) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, blocks_per_message=2))
    decode.pull("d", handle, [0, 1, 2, 3])
    first = scripted.welcome()
    second = scripted.expect(Pull)
    message = framed(*rows_message(first, 7, 7))
    begun = len(message) - len(row(7)) // 2
    scripted.throw(message[:begun])
    poll_until(lambda: bool(decode.blocks[1].any()))
    decode.scheduler.cancel_recv("d")
    decode.step()
    assert decode.report().failed_recving == {"d": "cancelled"}
    assert scripted.expect(Release).lease == "r"
    before = decode.blocks.clone()
    scripted.throw(message[begun:])
    scripted.say(*rows_message(second, 7, 7))
    decode.pull("e", handle, [9])
    third = scripted.expect(Pull)
    scripted.say(*rows_message(third, 8))
    output = decode.report()
    assert (output.finished_recving, output.num_retries) == (["e"], 0)
    assert same_bits(decode.blocks[:9], before[:9]), "a cancelled pull's blocks were written to"
    assert decode.blocks[9].view(torch.uint8).numpy().tobytes() == row(8)


def test_a_body_that_is_cancelled_has_kept_the_line_from_others(
    closing: Closing, scripted: Scripted, handle: KVHandle
) -> None:
    """What is behind it is not lost, though it comes later than the time limit allows: all of that time counts, also
    before the cancel."""
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=1.2))
    decode.pull("d", handle, [0, 1, 2, 3])
    first = scripted.welcome()
    decode.pull("e", handle, [9])
    second = scripted.expect(Pull)
    message = framed(*rows_message(first, 7, 7, 7, 7))
    for n in range(6):
        scripted.throw(message[n * 600 : (n + 1) * 600])
        time.sleep(0.21)  # a slow line, though not so slow that it seems dead
    decode.scheduler.cancel_recv("d")
    decode.step()
    assert decode.report().failed_recving == {"d": "cancelled"}
    scripted.expect(Release)
    puller = decode.worker._puller
    assert puller is not None
    [ours] = puller._connections
    scripted.throw(message[3600:])
    poll_until(lambda: ours._arriving is None)
    scripted.say(*rows_message(second, 8))
    output = decode.report()
    assert (output.finished_recving, output.num_retries) == (["e"], 0)
    scripted.expect(Ack)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_late_answer_of_any_length_is_passed_over(
    closing: Closing, scripted: Scripted, handle: KVHandle, num_rows: int
) -> None:
    decode = closing(KVPair(KVRole.CONSUMER))
    decode.pull("d", handle, [0, 1])
    pull = scripted.welcome()
    decode.scheduler.cancel_recv("d")
    decode.step()
    assert decode.report().failed_recving == {"d": "cancelled"}
    scripted.expect(Release)
    scripted.say(*rows_message(pull, *[7] * num_rows))
    decode.pull("e", handle, [9])
    scripted.say(*rows_message(scripted.expect(Pull), 8))
    output = decode.report()
    assert (output.finished_recving, output.num_retries) == (["e"], 0)
    assert not decode.blocks[:9].any()


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


def test_a_mistake_of_ours_fails_the_pulls_of_now_and_not_those_to_come(
    prefill: KVPair, scripted: Scripted, handle: KVHandle, decode: KVPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it strikes: here, where a pull is ordered and on no connection yet. Each ends with a reason."""
    decode.pull("d", handle, [0, 1, 2, 3])
    scripted.welcome()
    with monkeypatch.context() as patch:
        patch.setattr(connection, "Link", None)
        decode.pull("e", prefill.lease("s", [5]), [6])
        failed: dict[str, str] = {}
        while len(failed) < 2:
            failed |= decode.report().failed_recving
        assert failed == dict.fromkeys(["d", "e"], "internal error of the consumer")
    decode.pull("f", prefill.lease("t", [5]), [6])
    assert decode.report().finished_recving == ["f"]
    assert same_bits(decode.blocks[6], prefill.blocks[5])


@pytest.mark.parametrize("num_bytes", [0, 2000])
def test_close_while_a_pull_hangs(closing: Closing, scripted: Scripted, handle: KVHandle, num_bytes: int) -> None:
    decode = closing(KVPair(KVRole.CONSUMER, timeout_s=2 * DEADLINE_S))
    decode.pull("d", handle, [0, 1, 2, 3])
    scripted.throw(framed(*rows_message(scripted.welcome(), 1, 2, 3, 4))[:num_bytes])
    poll_until(lambda: bool(decode.blocks.any()) == bool(num_bytes))
    begin_s = time.monotonic()
    decode.close()
    assert time.monotonic() - begin_s < DEADLINE_S / 2
