"""A machine with torch, transformers and what these need, and nothing else, runs the kernels and the model runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.models.weights import weight_files, weights_digest

if TYPE_CHECKING:
    from tests.reference import Reference

ROOT = Path(__file__).resolve().parent.parent

#: Ours that a bare machine lacks. Not click, tqdm and yaml: transformers needs them.
ABSENT = (
    *("msgspec", "zmq", "redis", "grpc", "grpc_health", "grpc_reflection", "grpc_tools", "google", "protos"),
    *("blake3", "xxhash", "psutil", "prometheus_client", "aiohttp", "openai", "hypothesis", "pytest"),
)

#: Makes the absent ones absent: no finder finds them, which is what `find_spec` sees on such a machine too.
HIDE = """
    import json, sys

    absent = set(json.loads(sys.argv[1]))

    class Hiding:
        def __init__(self, finder):
            self.finder = finder

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in absent:
                return None
            return self.finder.find_spec(name, path, target)

        def __getattr__(self, name):
            return getattr(self.finder, name)

    sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""

IMPORT = """
    import importlib, pkgutil
    import benchmarks.serving, engine.models, kernels

    names = ["connectors.ec.base", "connectors.kv.base", "demo.random_checkpoint", "core.images", "core.vision_grid"]
    names += [f"engine.{name}" for name in (
        "image_preparer", "input_batch", "memory", "model_runner", "sampler", "scheduler_output", "settings")]
    names += [each.name for package in (kernels, engine.models)
              for each in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
    for name in names:
        importlib.import_module(name)
    assert not absent & {name.partition(".")[0] for name in sys.modules}
"""

GENERATE = """
    from pathlib import Path
    import torch
    from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECConnectorMetadata, ECConnectorOutput, ECSide
    from connectors.kv.base import (
        KVConnectorBase, KVConnectorConfig, KVConnectorMetadata, KVConnectorOutput, KVLayout, KVSide)
    from core.types import ECRole, KVHandle, KVRole, SamplingParams
    from engine.memory import CacheSizes
    from engine.model_runner import ModelRunner
    from engine.models.registry import open_model
    from engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

    class NoItems(ECConnectorBase):
        def has_cache_item(self, key): return False
        def start_load_caches(self): pass
        def save_caches(self, key, embeds): pass
        def get_finished(self): return ECConnectorOutput()
        def close(self): pass

    class NoPeers(KVConnectorBase):
        def make_handle(self, request_id, block_ids, num_tokens): return KVHandle("NoPeers", b"", num_tokens)
        def register_kv_caches(self, blocks): pass
        def start_load_kv(self): pass
        def get_finished(self): return KVConnectorOutput()
        def num_leases(self): return 0
        def close(self): pass

    model, prompt, num_tokens = Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
    size = 16
    adapter = open_model(model, "float32")
    runner = ModelRunner(
        adapter, torch.device("cpu"), vision=True, language=True, max_num_seqs=2, max_num_batched_tokens=64,
        max_model_len=128, block_size=size, notify=lambda: None)
    runner.load_weights(model)
    runner.profile()
    runner.allocate(CacheSizes(num_blocks=8, buffer_rows=64))
    layout = KVLayout(1, "m", "float32", adapter.num_layers, size, adapter.num_kv_heads, adapter.head_dim)
    assert layout.describe().startswith("version=1 model=m")
    runner.attach(
        NoItems(ECConnectorConfig(ECRole.BOTH, "n", torch.float32, adapter.embed_width, {}, print), ECSide.WORKER),
        NoPeers(KVConnectorConfig(KVRole.BOTH, layout, "i", {}, print), KVSide.WORKER))

    blocks = list(range(-(-(len(prompt) + num_tokens) // size)))
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    new = NewRequestData("r", prompt, [], [], sampling, [], blocks, 0)
    orders = {"ec_metadata": ECConnectorMetadata(), "kv_metadata": KVConnectorMetadata()}
    made = runner.execute_model(SchedulerOutput([new], num_scheduled_tokens={"r": len(prompt)}, **orders))
    tokens = [made.sampled["r"]]
    while len(tokens) < num_tokens:
        known = CachedRequestData(["r"], [[]], [len(prompt) + len(tokens) - 1])
        step = SchedulerOutput(cached_requests=known, num_scheduled_tokens={"r": 1}, **orders)
        tokens.append(runner.execute_model(step).sampled["r"])
    assert not runner.execute_model(SchedulerOutput(finished_request_ids=["r"], **orders)).sampled
    runner.close()
    print(json.dumps(tokens))
"""


def test_a_bare_machine_generates_what_transformers_does(tiny_model: Path, reference: Reference) -> None:
    conversation = [("user", ["Say something about the harbour."])]
    prompt = reference.inputs(conversation)["input_ids"][0].tolist()
    program = "".join(textwrap.dedent(part) for part in (HIDE, IMPORT, GENERATE))
    arguments = [json.dumps(ABSENT), str(tiny_model), json.dumps(prompt), "8"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == reference.generate(conversation, 8)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """As much of a checkpoint as a digest looks at."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("cache_home", ["", "relative"])
@pytest.mark.parametrize("has_home", [True, False])
def test_a_user_without_a_cache_folder_gets_no_files_elsewhere(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_home: str, has_home: bool
) -> None:
    workplace, home = tmp_path / "workplace", tmp_path / "home"
    workplace.mkdir()
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    # An account without a home folder, which is what `os.path.expanduser` leaves as it is.
    monkeypatch.setenv("HOME", str(home) if has_home else "~")
    digest = weights_digest(weights, weight_files(weights))
    assert digest == weights_digest(weights, weight_files(weights), tmp_path / "elsewhere")
    assert list(workplace.iterdir()) == []
    assert len(list(home.glob(".cache/triptych/digests/*.json"))) == has_home


def test_a_digest_that_cannot_be_remembered_leaves_no_file(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    weights_digest(weights, weight_files(weights), cache)
    (entry,) = cache.iterdir()
    entry.unlink()
    entry.mkdir()  # in the way of the rename
    assert len(weights_digest(weights, weight_files(weights), cache)) == 64
    assert os.listdir(cache) == [entry.name]
    assert "is not remembered" in caplog.text
