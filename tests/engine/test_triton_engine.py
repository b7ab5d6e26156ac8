"""The whole engine over Triton's kernels, under the interpreter, answers what transformers' `generate` answers.

In a process of its own: whether Triton interprets is decided where it is first imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.e2e.conversations import CONVERSATIONS

if TYPE_CHECKING:
    from tests.reference import Reference

ROOT = Path(__file__).resolve().parent.parent.parent
#: Fewer than 100 prompt tokens each; one with a picture, its deepstack levels among what is computed.
NAMES = ("no image", "one image")
NUM_TOKENS = 8

PROGRAM = """
import json, sys
from core.config import ConnectorConfig, EngineConfig
from core.types import ECRole, SamplingParams
from engine.llm import LLM
from tests.e2e.conversations import CONVERSATIONS

model, items, device, num_tokens, *names = sys.argv[1:]
store = ConnectorConfig("ECSharedStorageConnector", extra={"shared_storage_path": items})
llm = LLM(EngineConfig(
    model=model, ec_role=ECRole.BOTH, ec_connector=store, device=device, max_num_seqs=4, max_num_batched_tokens=32,
    max_model_len=128, num_gpu_blocks=16, encoder_cache_bytes=4 << 20))
conversations = [CONVERSATIONS[name] for name in names]
messages = [
    [(role, [("text", part) if isinstance(part, str) else ("image", None) for part in parts]) for role, parts in each]
    for each in conversations]
images = [[part for _, parts in each for part in parts if isinstance(part, bytes)] for each in conversations]
sampling = SamplingParams(temperature=0.0, max_tokens=int(num_tokens), ignore_eos=True)
made = [output.token_ids for output in llm.generate(messages, images, sampling, progress=False)]
# A random row, so that the sampling kernel has been there too; its distribution is tested elsewhere.
sampling = SamplingParams(temperature=1.0, top_k=1, top_p=0.5, seed=1, max_tokens=1, ignore_eos=True)
[output] = llm.generate(messages[:1], images[:1], sampling, progress=False)
llm.close()
print(json.dumps({"greedy": made, "top 1": output.token_ids}))
"""


def check(tiny_model: Path, reference: Reference, items: Path, device: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_model), str(items), device, str(NUM_TOKENS), *NAMES],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout)
    expected = [reference.generate(CONVERSATIONS[name], NUM_TOKENS) for name in NAMES]
    assert made["greedy"] == expected
    assert made["top 1"] == expected[0][:1]


def test_two_requests_under_the_interpreter(tiny_model: Path, reference: Reference, tmp_path: Path) -> None:
    check(tiny_model, reference, tmp_path, "cpu", {"TRITON_INTERPRET": "1", "TRIPTYCH_KERNELS": "triton"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_requests_on_a_gpu(tiny_model: Path, reference: Reference, tmp_path: Path) -> None:
    """Compiled kernels, and CUDA graphs for the decodes."""
    check(tiny_model, reference, tmp_path, "cuda", {"TRITON_INTERPRET": "0", "TRIPTYCH_KERNELS": "triton"})
