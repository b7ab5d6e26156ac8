"""Cutting a step out of the batch's arrays against a naive loop, through chunks, preemptions and reused rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.types import SamplingParams
from engine.input_batch import InputBatch
from engine.scheduler_output import CachedRequestData, NewRequestData

BLOCK = 4
MAX_LEN = 40


class Twin:
    """One request in plain lists."""

    def __init__(self, name: str, draw: random.Random) -> None:
        self.name = name
        self.prompt = [draw.randrange(1000) for _ in range(draw.randint(1, 20))]
        self.output: list[int] = []
        self.positions = np.array([[draw.randrange(50) for _ in self.prompt] for _ in range(3)])
        self.delta = draw.randint(-9, 0)
        self.blocks: list[int] = []
        self.computed = 0
        self.known = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def position(self, row: int, index: int) -> int:
        return int(self.positions[row, index]) if index < len(self.prompt) else index + self.delta


@pytest.mark.parametrize("seed", range(8))
def test_steps_equal_a_naive_loop(seed: int) -> None:
    draw = random.Random(seed)
    batch = InputBatch(3, MAX_LEN, BLOCK, 3)
    twins: list[Twin] = []
    for turn in range(60):
        while len(twins) < 3 and draw.random() < 0.6:
            twins.append(Twin(f"r{turn}-{len(twins)}", draw))
        for twin in list(twins):
            chance = draw.random()
            if twin.known and chance < 0.1:  # preempted: it comes back in full, its output with it
                batch.remove(twin.name)
                twin.known, twin.computed, twin.blocks = False, 0, []
            elif chance < 0.15 or len(twin.tokens) >= MAX_LEN:
                batch.remove(twin.name)
                twins.remove(twin)
        scheduled: dict[str, int] = {}
        cached = CachedRequestData()
        for twin in draw.sample(twins, len(twins)):
            count = draw.randint(1, len(twin.tokens) - twin.computed)
            scheduled[twin.name] = count
            missing = -(-(twin.computed + count) // BLOCK) - len(twin.blocks)
            new = [draw.randrange(100) for _ in range(missing)]
            twin.blocks += new
            if twin.known:
                cached.request_ids.append(twin.name)
                cached.new_block_ids.append(new)
                cached.num_computed_tokens.append(twin.computed)
                continue
            request = NewRequestData(
                twin.name, twin.prompt, list(twin.output), [], SamplingParams(), [], list(twin.blocks), twin.computed
            )
            batch.add(request, twin.positions, twin.delta)
            twin.known = True
        batch.update(cached)
        if not scheduled:
            continue
        inputs = batch.cut(scheduled)
        by_name = {twin.name: twin for twin in twins}
        ordered = [by_name[name] for name in inputs.request_ids]
        single = [scheduled[twin.name] == 1 and twin.computed > 0 for twin in ordered]
        assert single == sorted(single, reverse=True), "decodes stand first"
        assert sorted(inputs.request_ids) == sorted(scheduled)

        place = 0
        for i, twin in enumerate(ordered):
            count = scheduled[twin.name]
            span = range(twin.computed, twin.computed + count)
            assert (inputs.starts[i], inputs.query_lens[i], inputs.seq_lens[i]) == (place, count, span.stop)
            cut = slice(place, place + count)
            assert inputs.token_ids[cut].tolist() == twin.tokens[span.start : span.stop]
            for row in range(3):
                assert inputs.positions[row, cut].tolist() == [twin.position(row, index) for index in span]
            needed = -(-span.stop // BLOCK)
            assert inputs.block_table[i, :needed].tolist() == twin.blocks[:needed]
            place += count
            twin.computed = span.stop
            if twin.computed == len(twin.tokens):
                token = draw.randrange(1000)
                batch.append_token(int(inputs.rows[i]), token)
                twin.output.append(token)
            assert batch.num_tokens(int(inputs.rows[i])) == len(twin.tokens)
        assert place == len(inputs.token_ids) == inputs.positions.shape[1]


def test_rows_are_freed_once() -> None:
    batch = InputBatch(1, MAX_LEN, BLOCK, 1)
    for name in ("a", "b", "c"):
        request = NewRequestData(name, [1, 2], [], [], SamplingParams(), [], [0], 0)
        batch.add(request, np.zeros((1, 2), dtype=np.int64), 0)
        batch.remove(name)
        batch.remove(name)
    batch.add(request, np.zeros((1, 2), dtype=np.int64), 0)
    with pytest.raises(IndexError):
        batch.add(request, np.zeros((1, 2), dtype=np.int64), 0)


def test_a_request_without_a_seed_draws_one() -> None:
    batch = InputBatch(3, MAX_LEN, BLOCK, 1)
    for name, seed in (("a", None), ("b", None), ("c", 7)):
        request = NewRequestData(name, [1], [], [], SamplingParams(seed=seed), [], [0], 0)
        batch.add(request, np.zeros((1, 1), dtype=np.int64), 0)
    seeds = [batch.seeds[batch._row_of[name]] for name in "abc"]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7
