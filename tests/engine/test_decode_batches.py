"""Decode steps of fixed sizes: what the places without a request hold, and what comes back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.decode_batches import DecodeBatches, batch_sizes
from engine.input_batch import StepInputs
from engine.memory import CacheSizes
from engine.model_runner import ModelRunner
from engine.models.registry import open_model
from kernels.device_batch import DeviceBatch, build_device_batch

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def step_of(seq_lens: list[int], query_lens: list[int] | None = None) -> StepInputs:
    lens = np.array(seq_lens)
    new = np.array(query_lens or [1] * len(lens))
    table = np.random.default_rng(len(lens)).permutation(len(lens) * 6).reshape(len(lens), 6)
    starts = np.cumsum(new) - new
    tokens = np.arange(int(new.sum()))
    return StepInputs(
        request_ids=[str(i) for i in range(len(lens))],
        rows=np.arange(len(lens)),
        query_lens=new,
        seq_lens=lens,
        starts=starts,
        token_ids=tokens + 100,
        positions=np.stack((tokens + 7, tokens + 8, tokens + 9)),
        block_table=table[:, : -(-int(lens.max()) // BLOCK_SIZE)],
    )


def made_with(step: object) -> DecodeBatches:
    return DecodeBatches(
        step,  # type: ignore[arg-type]
        CPU,
        max_num_seqs=11,
        max_model_len=24,
        block_size=BLOCK_SIZE,
        num_position_rows=3,
    )


def test_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(27) == [1, 2, 4, 8, 16, 24, 27]


@pytest.mark.parametrize(("num_seqs", "size"), [(1, 1), (3, 4), (5, 8), (8, 8), (9, 11), (11, 11)])
def test_a_step_runs_in_the_next_larger_size(num_seqs: int, size: int) -> None:
    """A large step comes first: nothing of it may be left in the places of a later one."""
    calls: list[tuple[torch.Tensor, torch.Tensor, DeviceBatch]] = []

    def step(token_ids: torch.Tensor, positions: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        calls.append((token_ids.clone(), positions.clone(), batch))
        return torch.arange(len(token_ids))[:, None].repeat(1, 5)

    batches = made_with(step)
    batches.capture()  # where there are no graphs it does nothing
    assert not calls
    batches.logits(step_of([24] * 11))
    inputs = step_of(list(range(2, 2 + num_seqs)))
    assert batches.fits(inputs)
    logits = batches.logits(inputs)
    assert logits.tolist() == [[i] * 5 for i in range(num_seqs)]
    token_ids, positions, batch = calls[-1]
    expected = build_device_batch(
        inputs.query_lens, inputs.seq_lens, inputs.block_table, block_size=BLOCK_SIZE, device=CPU
    )
    padding = size - num_seqs
    assert token_ids.tolist() == [*inputs.token_ids, *[0] * padding]
    assert positions.tolist() == [[*row, *[0] * padding] for row in inputs.positions]
    assert batch.num_decodes == size
    assert batch.query_starts.tolist() == list(range(size + 1))
    assert batch.slots.tolist() == [*expected.slots, *[-1] * padding]
    assert batch.seq_lens.tolist() == [*expected.seq_lens, *[0] * padding]
    assert torch.equal(batch.block_table[:num_seqs, : expected.block_table.shape[1]], expected.block_table)
    assert batch.max_seq_len == 24


def test_what_a_capture_runs_touches_no_cache() -> None:
    """Before the first step there are no requests: every sequence is empty, and no slot is written to."""

    def step(token_ids: torch.Tensor, positions: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        assert batch.slots.tolist() == [-1] * 8
        assert batch.seq_lens.tolist() == [0] * 8
        return torch.zeros(len(token_ids), 1)

    assert len(made_with(step)._call(8)) == 8


def test_the_buffers_stay_where_they_are() -> None:
    """What a captured graph rests on."""
    places = []

    def step(token_ids: torch.Tensor, positions: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        tensors = (token_ids, positions, batch.slots, batch.seq_lens, batch.block_table, batch.query_starts)
        places.append([each.data_ptr() for each in tensors])
        return torch.zeros(len(token_ids), 1)

    batches = made_with(step)
    for seq_lens in ([3, 9], [24], [2] * 11):
        batches.logits(step_of(seq_lens))
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize(("seq_lens", "query_lens"), [([5, 9], [1, 3]), ([5, 1], [1, 1])])
def test_prompts_do_not_fit(seq_lens: list[int], query_lens: list[int]) -> None:
    batches = made_with(None)
    assert not batches.fits(step_of(seq_lens, query_lens))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_eager_engine_has_none(tiny_model: Path, enforce_eager: bool) -> None:
    runner = ModelRunner(
        open_model(tiny_model, "float32"), CPU, vision=False, language=True, max_num_seqs=2, max_num_batched_tokens=16,
        max_model_len=32, block_size=BLOCK_SIZE, notify=lambda: None, enforce_eager=enforce_eager,
    )  # fmt: skip
    runner.load_weights(tiny_model)
    assert runner._kernels is not None
    # Only Triton's kernels take such batches; nothing is launched here.
    runner._kernels = dataclasses.replace(runner._kernels, name="triton")
    runner.allocate(CacheSizes(num_blocks=8, buffer_rows=4))
    assert (runner._decodes is None) is enforce_eager
    runner.close()
