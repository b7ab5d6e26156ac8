"""Blocks through shared memory where both ends share a host: which road is taken, what it trusts, what it leaves."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
from collections.abc import Callable

import msgspec
import pytest
import torch

from connectors.kv import segment
from connectors.kv.base import SAME_HOST, KVSide
from connectors.kv.peer import KVPeerConnector
from connectors.kv.rows import BlockRows
from connectors.kv.segment import MappedSegment, UnreachableError, host_identity
from connectors.kv.shared_memory import KVSharedMemoryConnector
from core.errors import ConfigError, IncompatibleError
from core.types import KVHandle, KVRole
from tests.connectors.support import KVPair, same_bits, with_params

Closing = Callable[[KVPair], KVPair]


def segment_of(handle: KVHandle) -> str:
    name: str = msgspec.msgpack.decode(handle.params)["segment"]
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("same_host", "road"), [("auto", SAME_HOST), ("never", "network"), ("always", SAME_HOST)])
def test_either_road_brings_the_same_bits(closing: Closing, same_host: str, road: str, dtype: torch.dtype) -> None:
    prefill = closing(KVPair(KVRole.PRODUCER, dtype=dtype))
    decode = closing(KVPair(KVRole.CONSUMER, dtype=dtype, same_host=same_host, blocks_per_message=4))
    theirs, ours = [4, 5, 6, 15, 0, 1, 3, 2, 9], [8, 7, 0, 1, 2, 15, 13, 11, 4]
    decode.pull("d", prefill.lease("r", theirs), ours)
    output = decode.report()
    assert (output.finished_recving, output.roads, output.num_retries) == (["d"], {"d": road}, 0)
    assert output.bytes_received == prefill.blocks[theirs].nbytes
    assert same_bits(decode.blocks[ours], prefill.blocks[theirs])
    assert not decode.blocks[[i for i in range(16) if i not in ours]].view(torch.uint8).any()
    assert prefill.report().finished_sending == ["r"]


def test_a_producer_that_shares_nothing_is_pulled_from_over_the_network(closing: Closing) -> None:
    prefill, decode = closing(KVPair(KVRole.PRODUCER, same_host="never")), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.lease("r", [1])
    assert segment_of(handle) == ""
    decode.pull("d", handle, [0])
    assert decode.report().roads == {"d": "network"}


def test_a_name_that_leads_nowhere_means_the_network(closing: Closing) -> None:
    """As seen from another host, or another network namespace: nobody listens under that name here."""
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    elsewhere = with_params(prefill.lease("r", [1]), {"segment": "0" * 32, "host": "elsewhere/1234"})
    decode.pull("d", elsewhere, [0])
    output = decode.report()
    assert (output.roads, output.num_retries) == ({"d": "network"}, 0)
    strict = closing(KVPair(KVRole.CONSUMER, same_host="always"))
    strict.pull("e", with_params(elsewhere, {"request_id": "r2"}), [0])
    reason = strict.report().failed_recving["e"]
    assert "elsewhere/1234" in reason
    assert host_identity() in reason


def test_rows_that_are_reused_after_the_lease_are_never_taken_for_the_leased_ones(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the producer's checksum and the consumer's copy the router releases the lease and another request's
    keys are written to the blocks."""
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    handle = prefill.lease("r", [1, 2])
    copy = BlockRows.copy_from

    def too_late(self: BlockRows, *args: object) -> bytes:
        prefill.scheduler.release("r")
        prefill.step()
        prefill.blocks[2] = 7
        return copy(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockRows, "copy_from", too_late)
    decode.pull("d", handle, [0, 1])
    output = decode.report()
    assert (output.finished_recving, output.given_up_recving) == ([], ["d"])


def test_the_consumer_can_read_and_nothing_else(closing: Closing) -> None:
    prefill = closing(KVPair(KVRole.PRODUCER))
    name = segment_of(prefill.lease("r", [1]))
    mapped = MappedSegment(name, "instance-0", prefill.blocks[0].nbytes)
    assert not mapped.rows.flags.writeable
    assert mapped.rows.tobytes() == prefill.blocks.view(torch.uint8).numpy().tobytes()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect("\0triptych-kv-" + name)
        _, (fd,), _, _ = socket.recv_fds(asking, 1024, 1)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    for wrong in (("another instance", mapped.rows.shape[1]), ("instance-0", mapped.rows.shape[1] * 2)):
        with pytest.raises(UnreachableError, match="another engine"):
            MappedSegment(name, *wrong)


def test_the_mapping_outlives_the_producer(closing: Closing) -> None:
    prefill = closing(KVPair(KVRole.PRODUCER))
    name, expected = segment_of(prefill.lease("r", [1])), prefill.blocks.view(torch.uint8).numpy().tobytes()
    mapped = MappedSegment(name, "instance-0", prefill.blocks[0].nbytes)
    prefill.close()
    del prefill.blocks
    assert mapped.rows.tobytes() == expected
    with pytest.raises(UnreachableError, match="another host"):
        MappedSegment(name, "instance-0", mapped.rows.shape[1])


def test_memory_that_could_be_cut_short_is_not_mapped(closing: Closing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_SEALS", fcntl.F_SEAL_GROW)
    prefill = closing(KVPair(KVRole.PRODUCER))
    with pytest.raises(UnreachableError, match="cut short"):
        MappedSegment(segment_of(prefill.lease("r", [1])), "instance-0", prefill.blocks[0].nbytes)


def test_no_descriptor_is_left_behind() -> None:
    def once() -> None:
        prefill, decode = KVPair(KVRole.PRODUCER), KVPair(KVRole.CONSUMER)
        decode.pull("d", prefill.lease("r", [1]), [0])
        assert decode.report().roads == {"d": SAME_HOST}
        decode.close()
        prefill.close()

    once()
    gc.collect()  # what earlier tests left in cycles must not go away meanwhile
    before = sorted(os.listdir("/proc/self/fd"))
    once()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_connector_for_one_host_refuses_others_by_name(closing: Closing) -> None:
    prefill = closing(KVPair(KVRole.PRODUCER, cls=KVSharedMemoryConnector))
    decode = closing(KVPair(KVRole.CONSUMER, cls=KVSharedMemoryConnector))
    handle = prefill.lease("r", [1])
    assert handle.connector == "KVSharedMemoryConnector"
    assert decode.scheduler.get_num_new_matched_tokens(handle) == 4
    with pytest.raises(IncompatibleError) as caught:
        decode.scheduler.get_num_new_matched_tokens(with_params(handle, {"host": "elsewhere/1234"}))
    assert "elsewhere/1234" in str(caught.value)
    assert host_identity() in str(caught.value)
    decode.pull("d", handle, [0])
    assert decode.report().roads == {"d": SAME_HOST}
    assert same_bits(decode.blocks[0], prefill.blocks[1])


def test_where_no_shared_memory_can_be_had(closing: Closing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    prefill, decode = closing(KVPair(KVRole.PRODUCER)), closing(KVPair(KVRole.CONSUMER))
    decode.pull("d", prefill.lease("r", [1]), [0])
    assert decode.report().roads == {"d": "network"}
    worker = KVSharedMemoryConnector(prefill.worker.config, KVSide.WORKER)
    with pytest.raises(ConfigError, match=r"KVSharedMemoryConnector.*memfd_create"):
        worker.allocate_kv_cache(4096, torch.device("cpu"))
    worker.close()


@pytest.mark.parametrize(("cls", "value"), [(KVPeerConnector, "sometimes"), (KVSharedMemoryConnector, "never")])
def test_a_wrong_same_host_is_named(cls: type[KVPeerConnector], value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KVPair(KVRole.CONSUMER, cls=cls, same_host=value)
    assert (caught.value.name, caught.value.value) == ("--kv-connector-extra-config same_host", value)
