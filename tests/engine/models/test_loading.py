"""What a role loads, under which names, and what is refused before anything is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from core.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.models.registry import FAMILIES, open_model
from engine.models.weights import LoadReport, load_weights, weight_files
from tests.engine.models.conftest import Families

PARTS = ("vision", "language", "lm_head")


def _load(model_dir: Path, *, vision: bool, language: bool) -> tuple[ModelRunner, LoadReport]:
    runner = ModelRunner(
        open_model(model_dir, "bfloat16"),
        torch.device("cpu"),
        vision=vision,
        language=language,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=16,
        notify=lambda: None,
    )
    return runner, runner.load_weights(model_dir)


def _tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(model_dir) for name, tensor in load_file(file).items()}


def _parameters(model_dir: Path) -> dict[str, torch.Tensor]:
    """All parameters in float32, in the modules as they are before anything is packed."""
    adapter = open_model(model_dir, "float32")
    adapter.build(vision=True, language=True)
    targets = {part: getattr(adapter, part) for part in PARTS if part != "lm_head" or not adapter.ties_embeddings}
    load_weights(weight_files(model_dir), targets, adapter.rename, dtype=torch.float32, device=torch.device("cpu"))
    return {f"{part}.{name}": p for part, module in targets.items() for name, p in module.named_parameters()}


def test_each_role_loads_its_own_weights_and_no_others(families: Families, family: str) -> None:
    model_dir = families.model_dir(family)
    total = sum(tensor.nbytes for tensor in _tensors(model_dir).values())
    producer, vision = _load(model_dir, vision=True, language=False)
    consumer, language = _load(model_dir, vision=False, language=True)
    assert vision.loaded_bytes + vision.skipped_bytes == total
    assert language.loaded_bytes + language.skipped_bytes == total
    assert vision.loaded_bytes + language.loaded_bytes == total, "each tensor belongs to one of the two"
    assert min(vision.loaded_bytes, language.loaded_bytes) > 0
    assert producer.adapter.language is producer.adapter.lm_head is None
    assert consumer.adapter.vision is None
    for runner, parts in ((producer, ("vision",)), (consumer, ("language", "lm_head"))):
        for part in parts:
            module = getattr(runner.adapter, part)
            assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def test_published_and_newer_names_give_the_same_model(families: Families, family: str, tmp_path: Path) -> None:
    """Newer saves carry the names of transformers' classes; the published ones are renamed by it, and by us."""
    published = families.model_dir(family)
    model: Any = families.reference(family).model
    newer = _copy(published, tmp_path / "newer")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(state, newer / "model.safetensors", metadata={"format": "pt"})
    if family != "qwen3_vl":
        assert set(state) != set(_tensors(published))
    ours, theirs = _parameters(newer), _parameters(published)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    _, report = AutoModelForImageTextToText.from_pretrained(newer, output_loading_info=True)
    assert not any(report.values())


def test_llava_names_of_the_years_between(families: Families, tmp_path: Path) -> None:
    folder = _copy(families.model_dir("llava"), tmp_path / "between")
    state = families.reference("llava").model.state_dict()
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in state}
    save_file({names[name]: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    assert all(
        torch.equal(tensor, other)
        for tensor, other in zip(
            _parameters(folder).values(), _parameters(families.model_dir("llava")).values(), strict=True
        )
    )


def test_a_head_in_the_files_of_a_tied_model_is_used(families: Families, tmp_path: Path) -> None:
    """As transformers does where the two differ."""
    folder = _copy(families.model_dir("qwen2_vl"), tmp_path / "untied")
    tensors = _tensors(families.model_dir("qwen2_vl"))
    assert open_model(families.model_dir("qwen2_vl"), "auto").ties_embeddings
    head = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    assert not open_model(folder, "auto").ties_embeddings
    assert torch.equal(_parameters(folder)["lm_head.weight"], head)


def test_numbers_that_older_checkpoints_hold_are_no_weights(families: Families, tmp_path: Path) -> None:
    folder = _copy(families.model_dir("llava"), tmp_path / "older")
    extra = {
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "vision_tower.vision_model.embeddings.position_ids": torch.zeros(1, 37, dtype=torch.int64),
    }
    save_file({**_tensors(families.model_dir("llava")), **extra}, folder / "model.safetensors")
    _load(folder, vision=True, language=True)


def _copy(model_dir: Path, folder: Path) -> Path:
    """The same model without weights."""
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


def _edit(folder: Path, **changes: Any) -> None:
    """Set settings of config.json; a dict is merged into what is there."""
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))


def _first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def _cut(folder: Path) -> None:
    file = _first_shard(folder)
    file.write_bytes(file.read_bytes()[:-100])


def _empty(folder: Path) -> None:
    _first_shard(folder).write_bytes(b"")


def _lose_a_tensor(folder: Path) -> None:
    file = _first_shard(folder)
    with safe_open(file, framework="pt") as tensors:
        kept = {name: tensors.get_tensor(name) for name in sorted(tensors.keys())[1:]}
    save_file(kept, file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: _edit(folder, intermediate_size=160), r"weight model\.layers\.\d\.mlp\.\w+\.weight has shape"),
        (lambda folder: _edit(folder, vision_config={"embed_dim": 32}), r"weight visual\.[\w.]+ has shape"),
        (lambda folder: _edit(folder, num_hidden_layers=3), r"weight model\.layers\.3\.[\w.]+ is no part"),
        (lambda folder: _edit(folder, num_hidden_layers=5), r"no weights for language\.layers\.4\..*\(\d+ missing\)"),
        (_lose_a_tensor, r"has no weights for (vision|language)\..*\(1 missing\)"),
        (_cut, r"model-00001-of-\d+\.safetensors cannot be read"),
        (_empty, r"model-00001-of-\d+\.safetensors cannot be read"),
        (lambda folder: _first_shard(folder).unlink(), r"has no weight file model-00001"),
        (lambda folder: _edit(folder, num_attention_heads=0), r"config\.json"),
        (lambda folder: _edit(folder, hidden_size="wide"), r"config\.json is not usable"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    families: Families, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(families.model_dir("qwen2_vl"), folder)
    damage(folder)
    with pytest.raises(ConfigError, match=words) as caught:
        _load(folder, vision=True, language=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen2_vl", {"model_type": "gpt2"}, f"gpt2 is not supported; these are: {', '.join(FAMILIES)}"),
        ("qwen2_vl", {"model_type": "nonesuch"}, f"nonesuch is not supported; these are: {', '.join(FAMILIES)}"),
        ("qwen2_vl", {"use_sliding_window": True, "max_window_layers": 1}, "sliding-window"),
        ("qwen2_vl", {"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        (
            "llava",
            {"text_config": {"model_type": "mistral"}},
            "llava with clip_vision_model and mistral is not supported",
        ),
        (
            "llava",
            {"text_config": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    families: Families, tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    folder = _copy(families.model_dir(family), tmp_path / "model")
    _edit(folder, **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        open_model(folder, "auto")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": "qwen2_vl", "vision_config": 3}'])
def test_a_broken_configuration_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json is not usable") as caught:
        open_model(tmp_path, "auto")
    assert "\n" not in str(caught.value)
