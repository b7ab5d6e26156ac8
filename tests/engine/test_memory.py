"""Sizes of the two caches: within what is there, no more than can be used, and errors that name the option."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from engine.memory import CacheNeeds, _cgroup_free, available_bytes, size_caches

NEEDS = CacheNeeds(
    block_bytes=1000,
    block_size=16,
    row_bytes=100,
    max_model_len=160,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_gpu_blocks=None,
    encoder_cache_bytes=None,
)


def test_plenty_of_memory_gives_what_can_be_used_and_no_more() -> None:
    sizes = size_caches(NEEDS, 1 << 40)
    assert sizes.num_blocks == 4 * 10  # every request at its longest
    assert sizes.buffer_rows == 8 * 64


def test_little_memory_is_split() -> None:
    sizes = size_caches(NEEDS, 40_000)
    assert sizes.buffer_rows == 100  # a quarter
    assert sizes.num_blocks == 30


@given(st.integers(0, 1 << 20), st.integers(1, 5000), st.integers(1, 64))
def test_both_fit_into_what_is_there(available: int, block_bytes: int, block_size: int) -> None:
    needs = msgspec.structs.replace(NEEDS, block_bytes=block_bytes, block_size=block_size)
    try:
        sizes = size_caches(needs, available)
    except ConfigError:
        return
    assert sizes.num_blocks * block_bytes + sizes.buffer_rows * needs.row_bytes <= available
    assert sizes.num_blocks * block_size >= needs.max_model_len


def test_what_the_operator_sets_is_taken() -> None:
    needs = msgspec.structs.replace(NEEDS, num_gpu_blocks=10, encoder_cache_bytes=1234)
    assert msgspec.structs.astuple(size_caches(needs, 0)) == (10, 12)


def test_an_encoder_has_no_blocks() -> None:
    assert size_caches(msgspec.structs.replace(NEEDS, block_bytes=0), 1 << 30).num_blocks == 0


@pytest.mark.parametrize(
    ("changes", "available", "option", "reason"),
    [
        ({"num_gpu_blocks": 9}, 1 << 30, "--num-gpu-blocks", "--max-model-len 160 needs 10"),
        ({}, 10_000, "--max-model-len", "needs 10 blocks of 1000 bytes, memory is left for 7"),
        ({"encoder_cache_bytes": 99}, 1 << 30, "--encoder-cache-bytes", "one embedding alone has 100 bytes"),
        ({}, 100, "--encoder-cache-bytes", "no memory is left"),
    ],
)
def test_too_little_names_the_option(changes: dict[str, int], available: int, option: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        size_caches(msgspec.structs.replace(NEEDS, **changes), available)
    assert caught.value.name == option


def test_a_cpu_stage_leaves_most_of_the_host_to_the_others() -> None:
    cpu = torch.device("cpu")
    assert 0 < available_bytes(cpu, 0.9, 0) <= torch.iinfo(torch.int64).max
    assert available_bytes(cpu, 0.9, 1 << 60) == 0
    assert available_bytes(cpu, 0.1, 0) < available_bytes(cpu, 0.25, 0)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 500\ninactive_file 300\n"}, 400),
        ({"memory.max": "1000\n", "memory.current": "1200\n", "memory.stat": "anon 1200\n"}, 0),
        ({"memory.max": "max\n", "memory.current": "900\n", "memory.stat": ""}, 1 << 62),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "700\n",
                "memory/memory.stat": "inactive_file 50\ntotal_inactive_file 100\n",
            },
            400,
        ),
        ({}, 1 << 62),
    ],
    ids=["v2", "v2 full", "v2 without limit", "v1", "no cgroups"],
)
def test_what_a_containers_limit_leaves(tmp_path: Path, files: dict[str, str], free: int) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert _cgroup_free(tmp_path) == free
