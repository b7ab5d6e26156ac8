"""Decode steps in batches of a few fixed sizes, over buffers that stay where they are: on a GPU each size is captured
as a CUDA graph at the start, and a step is one replay.

A decode step of a small batch is hundreds of short kernels, and a host that launches them one by one takes longer than
they do. A graph launches all at once, but always with the same shapes and addresses. So a step of n requests runs in
the next larger size. The places that are left are padding: their sequences have length 0, which attention answers with
zeros, and their slots are negative, which the cache write skips; what comes out of them is not looked at.

The same code goes without graphs where there are none, under Triton's interpreter: it calls what would be captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from engine.input_batch import StepInputs
from kernels.device_batch import DeviceBatch, to_device

logger = logging.getLogger(__name__)

#: (token_ids [size], positions [num_position_rows, size], batch) -> logits [size, vocab]
DecodeStep = Callable[[torch.Tensor, torch.Tensor, DeviceBatch], torch.Tensor]

_STEP_OF_SIZES = 8
_WARM_UPS = 2


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every eighth, and the greatest."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    sizes += range(_STEP_OF_SIZES, max_num_seqs, _STEP_OF_SIZES)
    return [*sizes, max_num_seqs]


class DecodeBatches:
    """Runner's thread only. The KV cache that `step` works on must stay the same tensor."""

    def __init__(
        self,
        step: DecodeStep,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_position_rows: int,
    ) -> None:
        self._step = step
        self._device = device
        self._block_size = block_size
        self._sizes = batch_sizes(max_num_seqs)
        self._max_blocks = -(-max_model_len // block_size)
        #: Token ids, slots, and then the position rows: one copy to the device for all.
        self._inputs = torch.zeros(2 + num_position_rows, max_num_seqs, dtype=torch.int64, device=device)
        self._inputs[1] = -1  # what a capture runs must not write to the cache
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_num_seqs, self._max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Capture every size; does nothing where there are no CUDA graphs. Takes memory for one step's tensors of the
        greatest size, which the smaller ones share."""
        if self._device.type != "cuda":
            return
        begin_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        aside = torch.cuda.Stream(self._device)
        for size in reversed(self._sizes):
            # Kernels are compiled and libraries set up by a run; neither can be captured.
            aside.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UPS):
                    self._call(size)
            torch.cuda.current_stream(self._device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Connectors' threads may use the device meanwhile: what cannot be captured is forbidden to this one alone.
            with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                logits = self._call(size)
            self._graphs[size] = graph, logits
        logger.info("%d decode batches captured in %.1f s", len(self._sizes), time.monotonic() - begin_s)

    def fits(self, inputs: StepInputs) -> bool:
        """Whether the step has decodes alone: one new token a sequence, and something before it."""
        return bool((inputs.query_lens == 1).all() and (inputs.seq_lens > 1).all())

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """`[num_seqs, vocab]` of a step that fits. The memory is the next step's too."""
        num_seqs, width = inputs.block_table.shape
        size = next(size for size in self._sizes if size >= num_seqs)
        last = inputs.seq_lens - 1
        blocks = inputs.block_table[np.arange(num_seqs), last // self._block_size]
        places = np.zeros((len(self._inputs), size), dtype=np.int64)
        places[0, :num_seqs] = inputs.token_ids
        places[1, :num_seqs] = blocks * self._block_size + last % self._block_size
        places[1, num_seqs:] = -1
        places[2:, :num_seqs] = inputs.positions
        seq_lens = np.zeros(size, dtype=np.int32)
        seq_lens[:num_seqs] = inputs.seq_lens
        self._inputs[:, :size] = to_device(places, self._device)
        self._seq_lens[:size] = to_device(seq_lens, self._device)
        self._block_table[:num_seqs, :width] = to_device(inputs.block_table.astype(np.int32), self._device)
        if size in self._graphs:
            graph, logits = self._graphs[size]
            graph.replay()
        else:
            logits = self._call(size)
        return logits[:num_seqs]

    def _call(self, size: int) -> torch.Tensor:
        batch = DeviceBatch(
            num_decodes=size,
            max_seq_len=self._max_blocks * self._block_size,
            query_starts=self._starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=self._block_table[:size],
            slots=self._inputs[1, :size],
        )
        return self._step(self._inputs[0, :size], self._inputs[2:, :size], batch)
