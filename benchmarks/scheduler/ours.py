"""Our scheduler with its real managers and a real connector's scheduler side, without a model."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.scheduler.workload import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    SAMPLED,
    WARM_UP_STEPS,
    Requests,
)
from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECConnectorOutput, ECSide
from connectors.ec.shared_storage import ECSharedStorageConnector
from core.types import ECRole, SamplingParams
from engine.encoder_cache_manager import EncoderCacheManager
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import EngineCoreOutput, EngineCoreRequest
from engine.scheduler import Scheduler
from engine.scheduler_output import ModelRunnerOutput
from engine.settings import SchedulerSettings

_BUFFER_ROWS, _WIDTH = 4096, 1024


def connector_in(folder: Path) -> ECConnectorBase:
    """The scheduler side that an engine without images has, over a folder that stays empty. The caller closes it."""
    extra = {"shared_storage_path": str(folder)}
    config = ECConnectorConfig(ECRole.CONSUMER, "0" * 64, torch.bfloat16, _WIDTH, extra, lambda: None)
    return ECSharedStorageConnector(config, ECSide.SCHEDULER)


class Ours:
    """A Stepper."""

    def __init__(self, requests: Requests, connector: ECConnectorBase) -> None:
        self._turnover = requests.turnover
        self._prompts: dict[str, tuple[list[int], int]] = {}
        self._scheduler = Scheduler(
            SchedulerSettings(
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=requests.max_num_seqs,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                max_waiting=len(requests.prompts) + requests.max_num_seqs,
                where="bench",
            ),
            KVCacheManager(requests.num_blocks, BLOCK_SIZE),
            EncoderCacheManager(_BUFFER_ROWS, 2 * _WIDTH),
            connector,
            None,
        )
        for n, (prompt, max_tokens) in enumerate(zip(requests.prompts, requests.max_tokens, strict=True)):
            self._add(f"r{n}", prompt, max_tokens)
        while self._scheduler.make_stats().num_running < requests.max_num_seqs:
            self._step()
        self.steps(WARM_UP_STEPS)

    def steps(self, count: int) -> list[float]:
        return [self._step() for _ in range(count)]

    def _step(self) -> float:
        scheduler = self._scheduler
        begin_s = time.perf_counter()
        out = scheduler.schedule()
        scheduled_s = time.perf_counter()
        # As the runner answers it: every request whose tokens are all computed has a new one.
        made = ModelRunnerOutput(sampled=dict.fromkeys(out.num_scheduled_tokens, SAMPLED), ec=ECConnectorOutput())
        updated_s = time.perf_counter()
        outputs = scheduler.update_from_output(out, made)
        end_s = time.perf_counter()
        self._take(outputs)
        return end_s - updated_s + scheduled_s - begin_s

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        scheduler = self._scheduler
        scheduler.stats.take_observations()
        for output in outputs:
            if output.error:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            if output.finished:
                prompt, max_tokens = self._prompts.pop(output.request_id)
                if self._turnover:  # another prompt, so that none of it is cached
                    self._add(f"{output.request_id}+", [*prompt[1:], prompt[0]], max_tokens)

    def _add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self._prompts[request_id] = prompt, max_tokens
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._scheduler.add_request(
            EngineCoreRequest(request_id, time.time(), prompt_token_ids=prompt, sampling=sampling)
        )
