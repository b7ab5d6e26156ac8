"""Runs in vLLM's interpreter, where nothing of Triptych can be imported: a program, not a module.

A line of JSON in, a line out, until standard input ends:

    {}                           {"version": …}
    {"start": …}                 {"scheduler": number}       the fields of `workload.Requests`, and limits
    {"scheduler", "steps": n}    {"seconds": [n values]}
    {"forget": true}             {}                          the schedulers so far
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: Any model will do whose configuration is known without a download. Its weights are not read.
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
_HEAD_SIZE, _KV_HEADS = 64, 2


class Stepper:
    """A scheduler with the requests of `told`. `model` is a folder with a configuration."""

    def __init__(self, model: Path, told: dict[str, Any]) -> None:
        self._told = told
        self._requests: dict[str, tuple[list[int], int]] = {}
        self._scheduler, self._hasher = _make_scheduler(model, told)
        for n, (prompt, max_tokens) in enumerate(zip(told["prompts"], told["max_tokens"], strict=True)):
            self._add(f"r{n}", prompt, max_tokens)
        while len(self._scheduler.running) < told["max_num_seqs"]:
            self._step()
        for _ in range(told["warm_up_steps"]):
            self._step()

    def steps(self, count: int) -> list[float]:
        return [self._step() for _ in range(count)]

    def _step(self) -> float:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._scheduler
        begin_s = time.perf_counter()
        out = scheduler.schedule()
        scheduled_s = time.perf_counter()
        names = list(out.num_scheduled_tokens)
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: n for n, name in enumerate(names)},
            sampled_token_ids=[[self._told["sampled"]] for _ in names],
        )
        updated_s = time.perf_counter()
        outputs = scheduler.update_from_output(out, made)
        end_s = time.perf_counter()
        for made_for_client in outputs.values():
            for output in made_for_client.outputs:
                if output.finished:
                    prompt, max_tokens = self._requests.pop(output.request_id)
                    if self._told["turnover"]:
                        self._add(f"{output.request_id}+", [*prompt[1:], prompt[0]], max_tokens)
        return end_s - updated_s + scheduled_s - begin_s

    def _add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._requests[name] = prompt, max_tokens
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )


def _make_scheduler(model: Path, told: dict[str, Any]) -> tuple[Any, Any]:
    """A scheduler, and what names its requests' blocks: both as an engine of these limits makes them."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    block_size = told["block_size"]
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=told["max_model_len"],
        max_num_seqs=told["max_num_seqs"],
        max_num_batched_tokens=told["max_num_batched_tokens"],
        block_size=block_size,
        enable_prefix_caching=True,
        async_scheduling=False,
        enforce_eager=True,
    ).create_engine_config()
    num_blocks = told["num_blocks"] + 1  # it keeps one to itself
    config.cache_config.num_gpu_blocks = num_blocks
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=_KV_HEADS, head_size=_HEAD_SIZE, dtype=torch.bfloat16)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )
    return scheduler, get_request_block_hasher(block_size, hash_function)


def main() -> None:
    # What vLLM prints is not an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        steppers: list[Stepper] = []
        for line in sys.stdin:
            question = json.loads(line)
            answer: dict[str, Any] = {}
            if "start" in question:
                answer["scheduler"] = len(steppers)
                steppers.append(Stepper(Path(folder), question["start"]))
            elif "steps" in question:
                answer["seconds"] = steppers[question["scheduler"]].steps(question["steps"])
            elif "forget" in question:
                steppers.clear()
            else:
                import vllm.v1.core.sched.scheduler  # noqa: F401 - the slow part of the start

                answer["version"] = version("vllm")
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
