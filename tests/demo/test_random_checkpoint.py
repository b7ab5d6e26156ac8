"""Random checkpoints look downloaded, are the same for the same seed, and their output shows what they were shown."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from core.errors import ConfigError
from demo.checkpoint_families import FAMILIES, PRESETS, train_llava_tokenizer, train_qwen_tokenizer
from demo.random_checkpoint import main, make_checkpoint
from tests.pictures import picture
from tests.reference import Reference


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model_dir(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", family=family)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}
#: Beginnings of tensor names, as published checkpoints of the family have them.
NAMES = {
    "qwen3_vl": {"model.visual", "model.language_model", "lm_head.weight"},
    "qwen2_5_vl": {"visual.blocks", "visual.merger", "visual.patch_embed", "model.layers", "model.norm"}
    | {"model.embed_tokens", "lm_head.weight"},
    "qwen2_vl": {"visual.blocks", "visual.merger", "visual.patch_embed", "model.layers", "model.norm"}
    | {"model.embed_tokens"},
    "llava": {"vision_tower.vision_model", "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"}
    | {"language_model.model", "language_model.lm_head"},
}


def _answer(reference: Reference, images: list[bytes], num_tokens: int = 64) -> list[int]:
    return reference.generate([("user", [*images, "What do you see in this picture?"])], num_tokens)


def test_it_loads_like_a_downloaded_one(family: str, model_dir: Path, reference: Reference) -> None:
    model, tokenizer = reference.model, reference.tokenizer
    assert type(model).__name__ == CLASSES[family]
    assert model.config.tie_word_embeddings is (family == "qwen2_vl")
    eos = model.generation_config.eos_token_id
    assert tokenizer.eos_token_id in (eos if isinstance(eos, list) else [eos])
    assert len(tokenizer) <= model.config.text_config.vocab_size
    assert tokenizer.convert_ids_to_tokens(model.config.image_token_id) in ("<|image_pad|>", "<image>")
    index = json.loads((model_dir / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert {".".join(name.split(".")[:2]) for name in index} == NAMES[family]
    assert len(list(model_dir.glob("model-*.safetensors"))) >= 2
    assert sum(file.stat().st_size for file in model_dir.iterdir()) < 4 << 20
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in model_dir.iterdir())


def test_sections_of_mrope_fill_the_heads(family: str, reference: Reference) -> None:
    text = reference.model.config.text_config
    sections = text.rope_parameters.get("mrope_section")
    if family == "llava":
        assert sections is None
    else:
        assert sum(sections) == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) // 2


def test_every_weight_is_the_files(model_dir: Path) -> None:
    _, report = AutoModelForImageTextToText.from_pretrained(model_dir, output_loading_info=True)
    assert not any(report.values())


def test_output_varies_and_depends_on_every_picture_and_their_order(reference: Reference) -> None:
    a, b, c = (picture(seed, 96, 64) for seed in range(3))
    small = picture(0, 32, 96)
    prompts = {
        "none": [],
        "a": [a],
        "b": [b],
        "small": [small],
        "ab": [a, b],
        "ba": [b, a],
        "aa": [a, a],
        "abc": [a, b, c],
    }
    outputs = {name: _answer(reference, images) for name, images in prompts.items()}
    for name, tokens in outputs.items():
        assert len(set(tokens)) > 10, name
    for left, right in itertools.combinations(outputs, 2):
        assert outputs[left] != outputs[right], (left, right)


def test_the_same_seed_gives_the_same_bytes(family: str, model_dir: Path, tmp_path: Path) -> None:
    again = make_checkpoint(tmp_path / "again", family=family)
    names = sorted(file.name for file in model_dir.iterdir())
    assert sorted(file.name for file in again.iterdir()) == names
    assert all((again / name).read_bytes() == (model_dir / name).read_bytes() for name in names)
    other = make_checkpoint(tmp_path / "other", family=family, seed=1)
    different = [name for name in names if (other / name).read_bytes() != (model_dir / name).read_bytes()]
    assert different == [name for name in names if name.endswith(".safetensors")]


def test_dtype(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "half", family=family, dtype="bfloat16")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize("train", [train_qwen_tokenizer, train_llava_tokenizer])
def test_the_large_vocabulary_is_whole(train: Callable[[int], Tokenizer]) -> None:
    preset = PRESETS["bench"]
    tokenizer = train(preset.tokenizer_size)
    assert sorted(tokenizer.get_vocab().values()) == list(range(preset.tokenizer_size))
    assert preset.tokenizer_size <= preset.vocab_size
    text = "What do you see in this picture? Ünïcode 你好 🎉\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("option", ["family", "preset", "dtype"])
def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path, option: str) -> None:
    known = {"family": FAMILIES, "preset": PRESETS, "dtype": ("float32", "bfloat16")}[option]
    with pytest.raises(ConfigError, match=f"--{option}='nonesuch': supported are {', '.join(known)}"):
        make_checkpoint(tmp_path / "model", **{option: "nonesuch"})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_wrong_scale(tmp_path: Path, scale: float) -> None:
    with pytest.raises(ConfigError, match="--scale"):
        make_checkpoint(tmp_path / "model", scale=scale)


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        make_checkpoint(tmp_path / "model")
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["mine"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("demo.random_checkpoint.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        make_checkpoint(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "model"), "--seed", "3"]) == 0
    assert (tmp_path / "model" / "config.json").is_file()
    assert main([str(tmp_path / "other"), "--family", "nonesuch"]) == 2
    assert "supported are qwen3_vl, qwen2_5_vl, qwen2_vl, llava" in capsys.readouterr().err
