"""Requests' block lists: grown by need, taken away whole, and kept under a lease."""

from __future__ import annotations

import pytest

from core.types import SamplingParams
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import EngineCoreRequest
from engine.request import Request


def make(request_id: str) -> Request:
    core_request = EngineCoreRequest(request_id, 0.0, prompt_token_ids=[1], sampling=SamplingParams())
    return Request.from_core(core_request, 64)


def test_a_request_grows_block_by_block() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    request = make("r")
    assert [len(kv.allocate_slots(request, n) or []) for n in (1, 4, 5, 5, 16)] == [1, 0, 1, 0, 2]
    assert len(request.block_ids) == 4


def test_too_few_blocks_change_nothing() -> None:
    kv = KVCacheManager(num_blocks=3, block_size=4)
    request = make("r")
    kv.allocate_slots(request, 4)
    before = list(request.block_ids)
    assert kv.allocate_slots(request, 13) is None
    assert request.block_ids == before
    assert kv.pool.num_held == 1


def test_free_takes_everything_once() -> None:
    kv = KVCacheManager(num_blocks=3, block_size=4)
    request = make("r")
    kv.allocate_slots(request, 9)
    kv.free(request)
    kv.free(request)
    assert kv.pool.num_held == 0
    assert request.block_ids == []


def test_leased_blocks_outlive_their_request() -> None:
    kv = KVCacheManager(num_blocks=3, block_size=4)
    request = make("r")
    kv.allocate_slots(request, 9)
    kv.lease(request)
    kv.free(request)
    assert (kv.pool.num_held, kv.num_leases, kv.has_lease("r")) == (3, 1, True)
    kv.end_lease("r")
    assert (kv.pool.num_held, kv.num_leases, kv.has_lease("r")) == (0, 0, False)
    with pytest.raises(KeyError):
        kv.end_lease("r")
