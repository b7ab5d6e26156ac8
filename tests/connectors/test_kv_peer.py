"""KVPeerConnector when all is well: bytes, leases and how they end, handles, configuration, closing."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import pytest
import torch

from connectors import connections
from connectors.kv.base import KVLayout, KVSide
from connectors.kv.consumers import Consumer, Consumers
from connectors.kv.peer import KVPeerConnector
from core.errors import ConfigError, EngineError, IncompatibleError, InvalidRequestError
from core.types import KVHandle, KVRole
from tests.connectors.processes import serve_blocks
from tests.connectors.support import DEADLINE_S, LAYOUT, KVPair, num_parked, poll_until, same_bits, with_params

Closing = Callable[[KVPair], KVPair]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks_per_message", [1, 2, 64])
def test_blocks_arrive_bit_for_bit(closing: Closing, dtype: torch.dtype, blocks_per_message: int) -> None:
    prefill = closing(KVPair(KVRole.PRODUCER, dtype=dtype))
    decode = closing(KVPair(KVRole.CONSUMER, dtype=dtype, blocks_per_message=blocks_per_message))
    theirs, ours = [4, 5, 6, 15, 0, 1, 3, 2, 9], [8, 7, 0, 1, 2, 15, 13, 11, 4]
    handle = prefill.lease("r", theirs)
    assert decode.scheduler.get_num_new_matched_tokens(handle) == len(theirs) * LAYOUT.block_size
    decode.pull("d", handle, ours)
    output = decode.report()
    assert output.finished_recving == ["d"]
    assert output.bytes_received == prefill.blocks[theirs].nbytes
    assert len(output.seconds_receiving) == 1
    assert same_bits(decode.blocks[ours], prefill.blocks[theirs])
    others = [i for i in range(16) if i not in ours]
    assert not decode.blocks[others].any()

    output = prefill.report()
    assert (output.finished_sending, output.expired_sending) == (["r"], [])
    assert prefill.worker.num_leases() == 0


@pytest.mark.parametrize("head_dim", [4, 256])
def test_blocks_go_without_a_copy(closing: Closing, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the cache's own memory, whatever their size; what was sent before is sent again as it is now."""
    bodies: list[list[memoryview]] = []
    send = Consumers.send

    def watched(self: Consumers, consumer: Consumer, header: bytes, body: Iterable[memoryview] = ()) -> None:
        pieces = list(body)
        bodies.extend([pieces] if pieces else [])
        send(self, consumer, header, pieces)

    monkeypatch.setattr(Consumers, "send", watched)
    layout = msgspec.structs.replace(LAYOUT, num_layers=8, head_dim=head_dim)
    prefill = closing(KVPair(KVRole.PRODUCER, layout, num_blocks=8))
    decode = closing(KVPair(KVRole.CONSUMER, layout, num_blocks=8, same_host="never"))
    cache, row_bytes = prefill.blocks.view(torch.uint8).numpy(), prefill.blocks[0].nbytes
    for n in range(2):
        prefill.blocks += 1
        decode.pull(f"d{n}", prefill.lease(f"r{n}", [1, 2, 3, 7, 6]), [0, 1, 2, 3, 4])
        output = decode.report()
        assert (output.finished_recving, output.num_retries) == ([f"d{n}"], 0)
        assert same_bits(decode.blocks[:5], prefill.blocks[[1, 2, 3, 7, 6]])
        sent = [np.frombuffer(piece, np.uint8) for piece in bodies.pop()]
        assert bodies == []
        assert [len(piece) for piece in sent] == [3 * row_bytes, row_bytes, row_bytes], "neighbours are not one piece"
        assert all(np.shares_memory(piece, cache) for piece in sent)
        prefill.report()


def test_blocks_of_another_process(closing: Closing) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    prefill = spawn.Process(target=serve_blocks, args=(theirs,))
    prefill.start()
    decode = closing(KVPair(KVRole.CONSUMER))
    assert ours.poll(200)
    handle, raw = ours.recv()
    decode.pull("d", handle, [5, 0, 15])
    assert decode.report().finished_recving == ["d"]
    assert decode.blocks[[5, 0, 15]].view(torch.uint8).numpy().tobytes() == raw
    assert ours.poll(DEADLINE_S)
    assert ours.recv() == (["r"], [], 0)
    prefill.join(DEADLINE_S)
    assert prefill.exitcode == 0


def test_many_pulls_from_many_producers(closing: Closing, monkeypatch: pytest.MonkeyPatch) -> None:
    """More producers than connections that may be open at once."""
    monkeypatch.setattr(connections, "_MAX_CONNECTIONS", 2)
    producers = [closing(KVPair(KVRole.PRODUCER)) for _ in range(4)]
    decode = closing(KVPair(KVRole.CONSUMER, num_blocks=64, blocks_per_message=1))
    expected = {}
    for n in range(12):
        producer = producers[n % 4]
        remote, local = [n, 15 - n, (n + 5) % 16], [3 * n, 3 * n + 1, 3 * n + 2]
        decode.scheduler.update_state_after_alloc(f"d{n}", producer.lease(f"r{n}", remote), local)
        expected[f"d{n}"] = (local, producer.blocks[remote])
    decode.step()
    finished: list[str] = []

    def all_finished() -> bool:
        output = decode.worker.get_finished()
        assert not output.failed_recving
        finished.extend(output.finished_recving)
        return len(finished) == 12

    decode.bell.wait_for(all_finished)
    assert sorted(finished) == sorted(expected)
    for local, blocks in expected.values():
        assert same_bits(decode.blocks[local], blocks)
    sent = [request_id for producer in producers for request_id in _all_sent(producer)]
    assert sorted(sent) == sorted(f"r{n}" for n in range(12))


def _all_sent(producer: KVPair) -> list[str]:
    producer.bell.wait_for(lambda: producer.worker.num_leases() == 0)
    return producer.worker.get_finished().finished_sending


def test_a_pull_may_want_only_the_first_blocks(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    decode.pull("d", prefill.lease("r", [4, 9, 2, 7]), [3, 1])
    assert decode.report().finished_recving == ["d"]
    assert same_bits(decode.blocks[[3, 1]], prefill.blocks[[4, 9]])
    assert not decode.blocks[[0, 2, *range(4, 16)]].any()
    assert prefill.report().finished_sending == ["r"]


def test_a_pull_of_nothing_ends_the_lease(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    decode.pull("d", prefill.lease("r", [4]), [])
    assert decode.report().finished_recving == ["d"]
    assert prefill.report().finished_sending == ["r"]


def test_a_pull_that_comes_before_the_lease_waits_for_it(closing: Closing) -> None:
    """The handle leaves the producer with one step's output; the lease reaches its worker with the next."""
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.scheduler.request_finished("r", [4, 5], 8)
    decode.pull("d", handle, [0, 1])
    poll_until(lambda: num_parked(prefill) == 1)
    prefill.step()
    assert decode.report().finished_recving == ["d"]
    assert same_bits(decode.blocks[:2], prefill.blocks[4:6])


def test_a_lease_expires(closing: Closing) -> None:
    prefill = closing(KVPair(KVRole.PRODUCER, lease_s=1))
    prefill.lease("r", [1])
    assert prefill.worker.num_leases() == 1
    output = prefill.report()
    assert (output.finished_sending, output.expired_sending) == (["r"], ["r"])
    assert prefill.worker.num_leases() == 0


def test_the_router_releases_a_lease(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.lease("r", [1])
    prefill.scheduler.release("r")
    prefill.scheduler.release("never heard of")
    prefill.step()
    output = prefill.report()
    assert (output.finished_sending, output.expired_sending) == (["r"], [])
    decode.pull("d", handle, [0])
    output = decode.report()
    assert output.given_up_recving == ["d"]
    assert output.failed_recving == {}, "a cancelled request counted as a pull that failed"


def test_a_cancelled_pull_is_reported_and_frees_the_producer(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.scheduler.request_finished("r", [1], 4)  # no step yet: the pull will wait for its lease
    decode.pull("d", handle, [0])
    poll_until(lambda: num_parked(prefill) == 1)
    decode.scheduler.cancel_recv("d")
    decode.scheduler.cancel_recv("never heard of")
    decode.step()
    output = decode.report()
    assert output.failed_recving == {"d": "cancelled"}
    prefill.step()
    output = prefill.report()
    assert (output.finished_sending, output.expired_sending) == (["r"], [])
    decode.scheduler.cancel_recv("d")
    decode.pull("e", prefill.lease("r2", [1]), [2])
    assert decode.report().finished_recving == ["e"]
    assert not decode.blocks[0].any(), "a cancelled pull's blocks were written to"


def test_duplicate_orders_do_nothing(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.lease("r", [1])
    prefill.lease("r", [2])
    assert prefill.worker.num_leases() == 1
    decode.scheduler.update_state_after_alloc("d", handle, [0])
    decode.scheduler.update_state_after_alloc("d", handle, [5])
    decode.step()
    assert decode.report().finished_recving == ["d"]
    assert same_bits(decode.blocks[0], prefill.blocks[1])
    assert prefill.report().finished_sending == ["r"]
    decode.pull("e", prefill.lease("r2", [3]), [7])
    output = decode.report()
    assert (output.finished_recving, output.failed_recving) == (["e"], {})
    assert not decode.blocks[5].any()


def test_an_instance_may_be_both(closing: Closing) -> None:
    one, two = closing(KVPair(KVRole.BOTH)), closing(KVPair(KVRole.BOTH))
    expected = one.blocks[3].clone()
    two.pull("d", one.lease("r", [3]), [8])
    assert two.report().finished_recving == ["d"]
    assert same_bits(two.blocks[8], expected)
    expected = two.blocks[8].clone()
    one.report()
    one.pull("d", two.lease("r", [8]), [15])
    assert one.report().finished_recving == ["d"]
    assert same_bits(one.blocks[15], expected)


def test_a_consumer_serves_nothing_and_a_producer_pulls_nothing(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    assert decode.worker.handshake() == ""
    with pytest.raises(EngineError, match="handshake"):
        decode.scheduler.request_finished("r", [1], 4)
    decode.step()
    assert decode.report().finished_sending == ["r"], "a lease that nobody serves must not pin blocks"
    prefill.pull("p", prefill.lease("r", [1]), [0])
    assert "kv_producer" in prefill.report().failed_recving["p"]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n" * 64},
        {"dtype": "bfloat16"},
        {"num_layers": 3},
        {"block_size": 8},
        {"num_kv_heads": 1},
        {"head_dim": 16},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_layout_is_refused_with_both_values(closing: Closing, changes: dict[str, object]) -> None:
    other = msgspec.structs.replace(LAYOUT, **changes)
    prefill, decode = closing(KVPair(KVRole.PRODUCER, other)), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.lease("r", [1])
    with pytest.raises(IncompatibleError) as caught:
        decode.scheduler.get_num_new_matched_tokens(handle)
    assert f"ours is {LAYOUT.describe()}, theirs is {other.describe()}" in str(caught.value)
    decode.pull("d", handle, [0])
    reason = decode.report().failed_recving["d"]
    assert LAYOUT.describe() in reason
    assert other.describe() in reason


def test_another_layout_is_refused_by_the_producer_too(closing: Closing) -> None:
    """The handle says what the consumer wants to hear; the handshake does not."""
    other = msgspec.structs.replace(LAYOUT, dtype="bfloat16")
    prefill, decode = closing(KVPair(KVRole.PRODUCER, other)), closing(KVPair(KVRole.CONSUMER))
    forged = with_params(prefill.lease("r", [1]), {"layout": msgspec.to_builtins(LAYOUT)})
    decode.pull("d", forged, [0])
    reason = decode.report().failed_recving["d"]
    assert "refused" in reason
    assert LAYOUT.describe() in reason
    assert other.describe() in reason
    assert not decode.blocks.any()


def _garbage(handle: KVHandle) -> list[KVHandle]:
    replace = msgspec.structs.replace
    return [
        replace(handle, connector="KVSharedMemoryConnector"),
        replace(handle, params=b""),
        replace(handle, params=b"\xc1"),
        replace(handle, params=handle.params + b"\x00"),
        replace(handle, params=b"\x91" * 5000),
        replace(handle, params=b"\xdb\xff\xff\xff\xff"),
        replace(handle, params=b"x" * 100_000),
        replace(handle, num_tokens=7),
        with_params(handle, {"token": "guess"}),
        with_params(handle, {"address": "ipc:///tmp/socket"}),
        with_params(handle, {"address": "tcp://1.2.3.4:5;tcp://5.6.7.8:9"}),
        with_params(handle, {"address": "tcp://host:5\n"}),
        with_params(handle, {"num_blocks": -1}),
        with_params(handle, {"num_blocks": 0}),
        with_params(handle, {"num_blocks": 2**40}),
        with_params(handle, {"layout": 3}),
    ]


def test_handles_that_are_not_ours_are_refused(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    good = prefill.lease("r", [1])
    for bad in _garbage(good):
        with pytest.raises(InvalidRequestError, match="KV handle"):
            decode.scheduler.get_num_new_matched_tokens(bad)
        decode.pull("d", bad, [0])
        assert "KV handle" in decode.report().failed_recving["d"]
    with pytest.raises(IncompatibleError, match="wire protocol"):
        decode.scheduler.get_num_new_matched_tokens(with_params(good, {"version": 1}))
    decode.pull("d", good, [0])
    assert decode.report().finished_recving == ["d"]


def test_a_handle_can_be_sent_through_the_front_door(closing: Closing) -> None:
    prefill = closing(KVPair(KVRole.PRODUCER))
    handle = prefill.lease("r", [1, 2])
    assert len(handle.params) < 1024
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=KVHandle) == handle
    assert handle.connector == "KVPeerConnector"
    params = msgspec.msgpack.decode(handle.params)
    assert (params["num_blocks"], params["num_tokens"], params["instance"]) == (2, 8, "instance-0")
    assert params["address"] == prefill.address
    other = msgspec.msgpack.decode(prefill.lease("r2", [1, 2]).params)
    assert other["token"] != params["token"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"hots": "127.0.0.1"}, "hots"),
        ({"host": "tcp://127.0.0.1"}, "host"),
        ({"host": ""}, "host"),
        ({"port": 65536}, "port"),
        ({"port": "80"}, "port"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("inf")}, "lease_s"),
        ({"blocks_per_message": 0}, "blocks_per_message"),
        ({"timeout_s": -1}, "timeout_s"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KVPair(KVRole.PRODUCER, **extra)  # type: ignore[arg-type]
    assert caught.value.name == f"--kv-connector-extra-config {named}"
    assert caught.value.value == extra[named]


def test_a_port_that_is_taken_stops_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*cannot bind"):
            KVPair(KVRole.PRODUCER, port=port)


def test_an_address_of_another_host_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"bind_host.*cannot bind"):
        KVPair(KVRole.PRODUCER, bind_host="192.0.2.1")


def test_bind_host_and_port_are_used(closing: Closing) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    prefill = closing(KVPair(KVRole.PRODUCER, host="localhost", bind_host="0.0.0.0", port=port))
    assert prefill.address == f"tcp://localhost:{port}"
    decode = closing(KVPair(KVRole.CONSUMER))
    decode.pull("d", prefill.lease("r", [1]), [0])
    assert decode.report().finished_recving == ["d"]


def test_close_before_the_cache_is_there(closing: Closing) -> None:
    layout = KVLayout(1, "m", "float32", 1, 1, 1, 1)
    config = msgspec.structs.replace(closing(KVPair(KVRole.BOTH)).worker.config, layout=layout)
    worker = KVPeerConnector(config, KVSide.WORKER)
    port = int(worker.handshake().rpartition(":")[2])
    worker.close()
    worker.close()
    socket.create_server(("127.0.0.1", port)).close()


def test_a_cache_of_another_shape_is_a_mistake(closing: Closing) -> None:
    worker = closing(KVPair(KVRole.CONSUMER)).worker
    with pytest.raises(ValueError, match="not of layout"):
        worker.register_kv_caches(torch.zeros(4, LAYOUT.elements_per_block + 1))
