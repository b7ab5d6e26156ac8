"""A KV transfer between caches on a device: the kernels gather what the connectors send and scatter what they receive.

The caches are in host memory here, and the connectors are told otherwise; the kernels are interpreted. Streams and
pinned memory need a GPU: `tests/connectors/test_device_copy.py` runs there.
"""

from __future__ import annotations

import pytest
import torch

from connectors.device_copy import DeviceCopies
from connectors.kv import device_rows
from connectors.kv.rows import BlockRows, checksum_of
from core.types import KVRole
from kernels.dispatch import Kernels, LayerShapes, choose_kernels
from tests.connectors.support import KVPair, random_bits, same_bits

CPU = torch.device("cpu")


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Triton's; what asks for it finds a cache that is not in host memory."""
    monkeypatch.setattr(DeviceCopies, "on_host", False)
    shapes = LayerShapes(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16)
    return choose_kernels(CPU, torch.float32, shapes, {"TRITON_INTERPRET": "1"})


def test_from_one_connector_to_another(mover: Kernels) -> None:
    prefill = KVPair(KVRole.PRODUCER, mover=mover, same_host="never")
    decode = KVPair(KVRole.CONSUMER, mover=mover)
    try:
        before = decode.blocks.clone()
        theirs, ours = [4, 5, 6, 15, 0], [8, 7, 0, 1, 2]
        decode.pull("d", prefill.lease("r", theirs), ours)
        assert decode.report().finished_recving == ["d"]
        assert same_bits(decode.blocks[ours], prefill.blocks[theirs])
        others = [i for i in range(len(before)) if i not in ours]
        assert same_bits(decode.blocks[others], before[others])
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize("num_staged", [1, 2, 4, 100])
def test_a_transfer_larger_than_the_buffer_goes_in_pieces(
    mover: Kernels, num_staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch a piece, however many blocks it has. No block is changed by the first launch, at the start."""
    blocks = random_bits(12, 40, torch.float32)
    monkeypatch.setattr(device_rows, "_STAGING_BYTES", num_staged * 160 + 3)
    launches = []

    class Counted:
        def gather_blocks(self, cache: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
            launches.append(len(ids))
            mover.gather_blocks(cache, ids, staging)

        def scatter_blocks(self, staging: torch.Tensor, ids: torch.Tensor, cache: torch.Tensor) -> None:
            launches.append(len(ids))
            mover.scatter_blocks(staging, ids, cache)

    ours = blocks.clone()
    rows = BlockRows(ours, Counted())
    assert same_bits(ours, blocks)
    launches.clear()
    ids = [11, 0, 3, 4, 7]
    [made] = rows.read(ids)
    expected = {1: [1] * 5, 2: [2, 2, 1], 4: [4, 1], 100: [5]}[num_staged]
    assert launches == expected
    assert same_bits(torch.from_numpy(made).view(torch.float32), blocks[ids])
    back = torch.zeros_like(blocks)
    theirs = BlockRows(back, Counted())
    launches.clear()
    arrival = theirs.arrival(ids, checksum_of([made]))
    data = made.tobytes()
    while arrival.num_missing:
        place = arrival.places()[0][:99]  # some of it, as it comes over a line
        place[:] = data[: len(place)]
        data = data[len(place) :]
        arrival.received(len(place))
    assert not back.any(), "something landed before all of it was there"
    assert arrival.end()
    assert launches == expected
    assert same_bits(back[ids], blocks[ids])
    assert not back[[1, 2, 5, 6, 8, 9, 10]].any()


def test_what_came_damaged_does_not_land(mover: Kernels) -> None:
    """The cache of a device is written to when the checksums have been seen, not before."""
    back = torch.zeros(4, 40)
    arrival = BlockRows(back, mover).arrival([2, 0], checksum_of([random_bits(2, 40, torch.float32).numpy()]))
    while arrival.num_missing:
        place = arrival.places()[0]
        place[:] = bytes([7]) * len(place)
        arrival.received(len(place))
    assert not arrival.end()
    assert not back.any()


def test_without_a_mover_such_a_cache_is_refused(mover: Kernels) -> None:
    with pytest.raises(ValueError, match="needs a block mover"):
        BlockRows(torch.zeros(2, 4))
