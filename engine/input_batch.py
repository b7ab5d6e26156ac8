"""The runner's own copy of every request's state, in arrays that a step is cut out of without a loop over tokens."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.types import SamplingParams
from engine.scheduler_output import CachedRequestData, NewRequestData


@dataclass(slots=True)
class StepInputs:
    """One step's flattened tokens, on the host. Requests with one token and something before it stand first."""

    request_ids: list[str]
    rows: NDArray[np.int64]  # [num_seqs] row of each request in the batch's arrays
    query_lens: NDArray[np.int64]  # [num_seqs]
    seq_lens: NDArray[np.int64]  # [num_seqs] tokens in the cache after the step
    starts: NDArray[np.int64]  # [num_seqs] first token's place in the flattened batch
    token_ids: NDArray[np.int64]  # [num_tokens]
    positions: NDArray[np.int64]  # [num_position_rows, num_tokens]
    block_table: NDArray[np.int64]  # [num_seqs, max_blocks of the step]


class InputBatch:
    """Fixed rows, one a request that the scheduler calls known. Runner's thread only.

    The arrays have room for `max_num_seqs` requests of `max_model_len` tokens; pages that no request reaches are never
    touched and take no memory.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_position_rows: int) -> None:
        self.block_size = block_size
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._blocks = np.zeros((max_num_seqs, -(-max_model_len // block_size) + 1), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._position_delta = np.zeros(max_num_seqs, dtype=np.int64)
        self._prompt_positions: list[NDArray[np.int64] | None] = [None] * max_num_seqs
        self._num_position_rows = num_position_rows
        self.sampling: list[SamplingParams | None] = [None] * max_num_seqs
        self.seeds = [0] * max_num_seqs
        self.stop_ids: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.num_prompt_tokens = [0] * max_num_seqs

    def add(self, new: NewRequestData, positions: NDArray[np.int64], delta: int) -> None:
        """Take a request in. `positions` `[num_position_rows, num_prompt_tokens]` and `delta` come from the adapter."""
        row = self._free_rows.pop()
        self._row_of[new.request_id] = row
        tokens = [*new.prompt_token_ids, *new.output_token_ids]
        self._tokens[row, : len(tokens)] = tokens
        self._num_tokens[row] = len(tokens)
        self._blocks[row, : len(new.block_ids)] = new.block_ids
        self._num_blocks[row] = len(new.block_ids)
        self._num_computed[row] = new.num_computed_tokens
        self._position_delta[row] = delta
        self._prompt_positions[row] = positions
        self.sampling[row] = new.sampling
        # Without a seed of its own every request draws one, else equal prompts would get equal answers.
        self.seeds[row] = secrets.randbits(63) if new.sampling.seed is None else new.sampling.seed
        self.stop_ids[row] = new.stop_ids
        self.num_prompt_tokens[row] = len(new.prompt_token_ids)

    def remove(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
            self._prompt_positions[row] = None

    def update(self, cached: CachedRequestData) -> None:
        """Take in what changed for known requests."""
        for request_id, blocks, computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self._row_of[request_id]
            self._num_computed[row] = computed
            if blocks:
                count = self._num_blocks[row]
                self._blocks[row, count : count + len(blocks)] = blocks
                self._num_blocks[row] = count + len(blocks)

    def append_token(self, row: int, token_id: int) -> None:
        self._tokens[row, self._num_tokens[row]] = token_id
        self._num_tokens[row] += 1

    def num_tokens(self, row: int) -> int:
        return int(self._num_tokens[row])

    def cut(self, num_scheduled: dict[str, int]) -> StepInputs:
        """Flatten one step."""
        order = sorted(num_scheduled, key=lambda r: num_scheduled[r] > 1 or not self._num_computed[self._row_of[r]])
        rows = np.array([self._row_of[request_id] for request_id in order], dtype=np.int64)
        query_lens = np.array([num_scheduled[request_id] for request_id in order], dtype=np.int64)
        computed = self._num_computed[rows]
        seq_lens = computed + query_lens
        starts = np.cumsum(query_lens) - query_lens
        seq_of_token = np.repeat(np.arange(len(order)), query_lens)
        index = np.arange(len(seq_of_token)) - starts[seq_of_token] + computed[seq_of_token]
        row_of_token = rows[seq_of_token]
        positions = np.broadcast_to(
            index + self._position_delta[row_of_token], (self._num_position_rows, len(index))
        ).copy()
        for i, row in enumerate(rows):
            begin, end = int(computed[i]), int(min(seq_lens[i], self.num_prompt_tokens[row]))
            if begin < end:  # tokens of the prompt have positions of their own
                known = self._prompt_positions[row]
                assert known is not None
                positions[:, starts[i] : starts[i] + end - begin] = known[:, begin:end]
        width = int(-(-seq_lens.max() // self.block_size))
        return StepInputs(
            request_ids=order,
            rows=rows,
            query_lens=query_lens,
            seq_lens=seq_lens,
            starts=starts,
            token_ids=self._tokens[row_of_token, index].astype(np.int64),
            positions=positions,
            block_table=self._blocks[rows, :width].astype(np.int64),
        )
