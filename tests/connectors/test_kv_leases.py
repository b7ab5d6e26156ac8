"""How long blocks stay pinned, and for whom: short leases that a living consumer renews."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from connectors.kv import link, server
from connectors.kv.base import KVLease
from connectors.kv.leases import LeaseTable, NoLease
from core.errors import ConfigError
from core.types import KVRole
from tests.connectors.support import DEADLINE_S, KVPair, num_parked, poll_until, same_bits, with_params

Closing = Callable[[KVPair], KVPair]
LEASE = KVLease("r", [1], 4, "t" * 32)


def test_a_renewed_lease_outlives_those_that_are_not() -> None:
    table = LeaseTable(10, 100)
    table.add(LEASE, 0)
    table.add(KVLease("s", [2], 4, "s" * 32), 1)
    assert table.next_expiry_s() == 10
    assert table.renew("r", LEASE.token, 9) is LEASE
    assert table.next_expiry_s() == 11
    assert table.expire(18.9) == 1
    assert table.take_ended().expired_sending == ["s"]
    assert table.expire(19) == 1
    assert table.find("r", LEASE.token) is NoLease.EXPIRED


def test_nobody_renews_for_ever() -> None:
    table = LeaseTable(10, 25)
    table.add(LEASE, 0)
    for now_s in range(5, 40, 5):
        if table.expire(now_s):
            break
        table.renew("r", LEASE.token, now_s)
    assert now_s == 30, "renewed at 20 for the last time"
    assert table.take_ended().expired_sending == ["r"]


def test_a_stranger_renews_nothing() -> None:
    table = LeaseTable(10, 100)
    table.add(LEASE, 0)
    assert table.renew("r", "0" * 32, 9) is NoLease.WRONG_TOKEN
    assert table.renew("q", LEASE.token, 9) is NoLease.UNKNOWN
    assert table.expire(10) == 1


def test_a_late_request_hears_how_the_lease_ended() -> None:
    table = LeaseTable(10, 100)
    for name, token in (("a", "a" * 32), ("b", "b" * 32), ("c", "c" * 32)):
        table.add(KVLease(name, [1], 4, token), 0)
    assert table.end("a", "a" * 32)
    assert table.release("b")
    assert table.expire(10) == 1
    found = [table.find(name, name * 32) for name in "abc"]
    assert found == [NoLease.DONE, NoLease.GIVEN_UP, NoLease.EXPIRED]


def test_a_consumer_that_waits_for_room_keeps_its_lease(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER, lease_s=2)), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.lease("r", [1])
    decode.scheduler.expect_recv("d", handle)
    ordered = decode.scheduler.has_orders
    decode.step()
    assert (ordered, decode.scheduler.has_orders) == (True, False)
    prefill.lease("forgotten", [2])
    prefill.lease("forgotten too", [3])
    first, second = prefill.report(), prefill.report() if prefill.worker.num_leases() > 1 else None
    ended = first.expired_sending + (second.expired_sending if second else [])
    assert sorted(ended) == ["forgotten", "forgotten too"], "the lease that was renewed ended, or the others did not"
    decode.pull("d", handle, [0])
    output = decode.report()
    assert output.finished_recving == ["d"]
    assert output.num_retries == 0
    output = prefill.report()
    assert (output.finished_sending, output.expired_sending) == (["r"], [])


def test_renewals_that_a_connection_has_no_room_for_yet_cost_it_nothing(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server takes its time, and there are more leases to renew than messages may wait."""
    monkeypatch.setattr(link, "_MAX_WAITING", 3)
    answered, real = threading.Event(), socket.getaddrinfo

    def slowly(*given: Any, **more: Any) -> Any:
        assert more.get("flags") or answered.wait(DEADLINE_S)
        return real(*given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    prefill = closing(KVPair(KVRole.PRODUCER, host="localhost"))
    decode = closing(KVPair(KVRole.CONSUMER, same_host="never"))
    handles = [prefill.lease(f"r{n}", [n]) for n in range(5)]
    for n, handle in enumerate(handles):
        decode.scheduler.expect_recv(f"d{n}", handle)
    decode.pull("d4", handles[4], [0])
    puller = decode.worker._puller
    assert puller is not None
    poll_until(lambda: len(puller._kept) == 5 and len(puller._transfers) == 1)
    answered.set()
    output = decode.report()
    assert (output.finished_recving, output.num_retries) == (["d4"], 0)
    assert same_bits(decode.blocks[0], prefill.blocks[4])


def test_a_consumer_that_died_loses_its_lease_soon(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER, lease_s=0.2)), closing(KVPair(KVRole.CONSUMER))
    decode.scheduler.expect_recv("d", prefill.lease("r", [1]))
    decode.step()
    decode.close()
    output = prefill.report()
    assert (output.finished_sending, output.expired_sending) == (["r"], ["r"])


def test_a_pull_that_was_only_expected_is_cancelled_without_a_report(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    decode.scheduler.expect_recv("d", prefill.lease("r", [1]))
    decode.step()
    decode.scheduler.cancel_recv("d")
    decode.step()
    output = prefill.report()
    assert (output.finished_sending, output.expired_sending) == (["r"], []), "the producer waits for nobody"
    assert not decode.worker.get_finished()


@pytest.mark.parametrize("same_host", ["auto", "never"])
def test_a_release_that_overtakes_the_cancel_is_no_failure(closing: Closing, same_host: str) -> None:
    """The router gives the lease up while the pull waits; the consumer's own cancel has not come yet."""
    prefill = closing(KVPair(KVRole.PRODUCER))
    decode = closing(KVPair(KVRole.CONSUMER, same_host=same_host))
    handle = prefill.scheduler.request_finished("r", [1], 4)  # no step yet: the pull will wait for its lease
    decode.pull("d", handle, [0])
    poll_until(lambda: num_parked(prefill) == 1)
    prefill.scheduler.release("r")
    prefill.step()
    output = decode.report()
    assert (output.given_up_recving, output.failed_recving, output.num_retries) == (["d"], {}, 0)
    decode.scheduler.cancel_recv("d")
    decode.step()
    assert not decode.worker.get_finished(), "reported twice"


def test_an_expired_or_unknown_lease_is_a_failure(closing: Closing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_UNKNOWN_LEASE_GRACE_S", 0.05)
    prefill, decode = closing(KVPair(KVRole.PRODUCER, lease_s=0.05)), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.lease("r", [1])
    assert prefill.report().expired_sending == ["r"]
    decode.pull("d", handle, [0])
    output = decode.report()
    assert "nobody renewed it" in output.failed_recving["d"]
    decode.pull("e", with_params(handle, {"token": "0" * 32}), [0])
    output = decode.report()
    assert "lease unknown" in output.failed_recving["e"]
    assert output.given_up_recving == []


def test_the_longest_lease_is_not_shorter_than_a_lease() -> None:
    with pytest.raises(ConfigError, match="max_lease_s") as caught:
        KVPair(KVRole.PRODUCER, lease_s=20, max_lease_s=10)
    assert caught.value.value == 10
