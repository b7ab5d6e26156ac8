"""Buffers that are not in host memory: both connectors stage, and the bytes are the same.

The staging itself needs no GPU, so it runs everywhere; streams and pinned memory do, and run where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from connectors.device_copy import DeviceCopies
from core.types import KVRole
from kernels.dispatch import LayerShapes, choose_kernels
from tests.connectors.support import ECPair, KVPair, key, random_bits, same_bits

SHAPES = LayerShapes(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(params=["staged", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "staged":
        monkeypatch.setattr(DeviceCopies, "on_host", False)
        return "cpu"
    return "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings(tmp_path: Path, closing: Callable[[ECPair], ECPair], device: str, dtype: torch.dtype) -> None:
    pair = closing(ECPair(tmp_path, dtype=dtype, device=device))
    pair.buffer.copy_(random_bits(32, 6, dtype))
    expected = pair.buffer[3:10].cpu()
    assert pair.save(key(1), pair.buffer[3:10]).finished_saving == [key(1)]
    assert pair.load(key(1), 20, 7).finished_loading == [key(1)]
    assert same_bits(pair.buffer[20:27].cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks(closing: Callable[[KVPair], KVPair], device: str, dtype: torch.dtype) -> None:
    # "staged" is host memory that pretends; it must not be shared as such.
    mover = choose_kernels(torch.device(device), dtype, SHAPES, {})
    prefill = closing(KVPair(KVRole.PRODUCER, dtype=dtype, device=device, mover=mover, same_host="never"))
    decode = closing(KVPair(KVRole.CONSUMER, dtype=dtype, device=device, mover=mover, blocks_per_message=2))
    theirs, ours = [4, 5, 6, 15, 0], [8, 7, 0, 1, 2]
    decode.pull("d", prefill.lease("r", theirs), ours)
    assert decode.report().finished_recving == ["d"]
    assert same_bits(decode.blocks[ours].cpu(), prefill.blocks[theirs].cpu())
    assert prefill.report().finished_sending == ["r"]
