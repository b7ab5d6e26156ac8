"""A 7B-shaped model with random weights, one decode step of the engine's runner: from its inputs on the host to tokens.

Beside it the same runner with PyTorch's operators instead of the kernels.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.kernels.measuring import Case, Sizes
from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECConnectorMetadata, ECConnectorOutput, ECSide
from core.types import ECRole, SamplingParams
from engine.memory import CacheSizes
from engine.model_runner import ModelRunner
from engine.models.registry import open_model
from engine.models.weights import LoadReport
from engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from kernels.dispatch import VARIABLE

_BLOCK_SIZE = 16
_DEVIATION = 0.02


class _NoItems(ECConnectorBase):
    """Text alone: no item is asked for."""

    def has_cache_item(self, key: str) -> bool | None:
        return False

    def start_load_caches(self) -> None: ...

    def save_caches(self, key: str, embeds: torch.Tensor) -> None: ...

    def get_finished(self) -> ECConnectorOutput:
        return ECConnectorOutput()

    def close(self) -> None: ...


def cases(sizes: Sizes) -> Iterator[Case]:
    for num_seqs in (1, 2) if sizes.quick else (1, 32):
        decoder = Decoder(sizes, num_seqs, "triton")
        other = functools.cache(functools.partial(Decoder, sizes, num_seqs, "torch"))
        yield Case(
            kernel="model decode",
            shape=f"{num_seqs} x {decoder.num_tokens}, {decoder.weight_bytes / 2e9:.1f} billion weights",
            ours=decoder.step,
            num_bytes=decoder.weight_bytes + decoder.cached_bytes,
            others={"torch": lambda other=other: other().step()},  # type: ignore[misc]
            goal=0.75,
        )


class Decoder:
    """A runner with some prompts computed. Each `step` makes one token a sequence."""

    def __init__(self, sizes: Sizes, num_seqs: int, kernels: str) -> None:
        self.num_tokens, max_len = (20, 64) if sizes.quick else (512, 8192)
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {VARIABLE: kernels}):
            _config(sizes.quick).save_pretrained(folder)
            adapter = open_model(Path(folder), "bfloat16")
            self.runner = ModelRunner(
                adapter, sizes.device, vision=False, language=True, max_num_seqs=num_seqs,
                max_num_batched_tokens=num_seqs * self.num_tokens, max_model_len=max_len, block_size=_BLOCK_SIZE,
                notify=lambda: None,
            )  # fmt: skip
            # Instead of 15 GB of files: the modules are filled where they are.
            with (
                mock.patch("engine.model_runner.weight_files", return_value=[]),
                mock.patch("engine.model_runner.load_weights", _fill),
            ):
                self.runner.load_weights(Path(folder))
        assert adapter.language is not None
        assert adapter.lm_head is not None
        # Of the embeddings a step reads some rows.
        modules = (adapter.language, adapter.lm_head)
        matrices = sum(p.nbytes for module in modules for p in module.parameters())
        embeddings: nn.Module = adapter.language.embed_tokens  # type: ignore[assignment]
        self.weight_bytes = matrices - sum(p.nbytes for p in embeddings.parameters())
        per_token = 2 * adapter.num_layers * adapter.num_kv_heads * adapter.head_dim * 2
        self.cached_bytes = num_seqs * self.num_tokens * per_token
        num_blocks = -(-max_len // _BLOCK_SIZE)
        self.runner.allocate(CacheSizes(num_blocks=num_seqs * num_blocks, buffer_rows=1))
        config = ECConnectorConfig(ECRole.CONSUMER, "n", torch.bfloat16, adapter.embed_width, {}, lambda: None)
        self.runner.attach(_NoItems(config, ECSide.WORKER), None)

        self._names = [str(i) for i in range(num_seqs)]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_len, ignore_eos=True)
        new = []
        for i, name in enumerate(self._names):
            prompt = torch.randint(0, adapter.vocab_size // 2, (self.num_tokens,)).tolist()
            blocks = list(range(i * num_blocks, (i + 1) * num_blocks))
            new.append(NewRequestData(name, prompt, [], [], sampling, [], blocks, 0))
        self._computed = 0
        self._execute(new, self.num_tokens)

    def step(self) -> object:
        return self._execute([], 1)

    def _execute(self, new: list[NewRequestData], num_tokens: int) -> object:
        known = CachedRequestData()
        if not new:
            count = len(self._names)
            known = CachedRequestData(self._names, [[] for _ in range(count)], [self._computed] * count)
        self._computed += num_tokens
        out = SchedulerOutput(
            new_requests=new,
            cached_requests=known,
            num_scheduled_tokens=dict.fromkeys(self._names, num_tokens),
            ec_metadata=ECConnectorMetadata(),
        )
        return self.runner.execute_model(out)


def _config(quick: bool) -> Any:
    from transformers import Qwen2_5_VLConfig

    sizes: dict[str, Any] = {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    }  # fmt: skip
    sections = [16, 24, 24]
    if quick:
        sizes |= {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 96,
        }  # fmt: skip
        sections = [1, 1, 2]
    rope = {"rope_type": "default", "type": "default", "mrope_section": sections, "rope_theta": 1e6}
    config = Qwen2_5_VLConfig(text_config={**sizes, "rope_parameters": rope, "rope_scaling": rope})
    config.tie_word_embeddings = False
    return config


def _fill(
    _files: list[Path], targets: dict[str, nn.Module], _rename: Callable[[str], Any], *, dtype: torch.dtype,
    device: torch.device,
) -> LoadReport:  # fmt: skip
    """In `load_weights`' place: random weights of `dtype`, made on `device`."""
    report = LoadReport()
    for module in targets.values():
        for name, parameter in list(module.named_parameters()):
            path, _, leaf = name.rpartition(".")
            made = torch.empty(parameter.shape, dtype=dtype, device=device)
            made = made.normal_(std=_DEVIATION) if made.ndim > 1 else made.fill_(0.0 if leaf == "bias" else 1.0)
            setattr(module.get_submodule(path), leaf, nn.Parameter(made, requires_grad=False))
            report.loaded_bytes += made.nbytes
    return report
