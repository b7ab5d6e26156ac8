"""Random checkpoints look downloaded, are the same for the same seed, and their output shows what they were shown."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from core.errors import ConfigError
from demo.checkpoint_families import FAMILIES, PRESETS, train_qwen_tokenizer
from demo.random_checkpoint import main, make_checkpoint


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def parts(model_dir: Path) -> tuple[Any, Any, Any]:
    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(model_dir), Qwen2VLImageProcessorPil.from_pretrained(model_dir)


def _picture(seed: int, size: tuple[int, int] = (96, 64)) -> Image.Image:
    return Image.frombytes("RGB", (6, 6), random.Random(seed).randbytes(108)).resize(size)


def _greedy(parts: tuple[Any, Any, Any], images: list[Image.Image], num_tokens: int = 64) -> list[int]:
    model, tokenizer, processor = parts
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "What do you see in this picture?"}]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    features: dict[str, Any] = dict(processor(images, return_tensors="pt")) if images else {}
    pad = model.config.image_token_id
    counts = iter(int(grid.prod()) // 4 for grid in features.get("image_grid_thw", []))
    ids = [new for old in ids for new in ([pad] * next(counts) if old == pad else [old])]
    inputs = torch.tensor([ids])
    if images:
        features["mm_token_type_ids"] = (inputs == pad).int()
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        **features,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    return [int(token) for token in output[0, len(ids) :]]


def test_it_loads_like_a_downloaded_one(model_dir: Path, parts: tuple[Any, Any, Any]) -> None:
    model, tokenizer, _ = parts
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert model.config.text_config.rope_parameters["mrope_section"] == [6, 5, 5]
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert len(tokenizer) <= model.config.text_config.vocab_size
    names = {name.split(".")[0] + "." + name.split(".")[1] for name in model.state_dict()}
    assert names == {"model.visual", "model.language_model", "lm_head.weight"}
    assert len(list(model_dir.glob("model-*.safetensors"))) >= 2
    assert sum(file.stat().st_size for file in model_dir.iterdir()) < 4 << 20
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in model_dir.iterdir())


def test_every_weight_is_the_files(model_dir: Path) -> None:
    _, report = AutoModelForImageTextToText.from_pretrained(model_dir, output_loading_info=True)
    assert not any(report.values())


def test_output_varies_and_depends_on_every_picture_and_their_order(parts: tuple[Any, Any, Any]) -> None:
    a, b, c = (_picture(seed) for seed in range(3))
    small = _picture(0, (32, 96))
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
    outputs = {name: _greedy(parts, images) for name, images in prompts.items()}
    for name, tokens in outputs.items():
        assert len(set(tokens)) > 10, name
    for left, right in itertools.combinations(outputs, 2):
        assert outputs[left] != outputs[right], (left, right)


def test_the_same_seed_gives_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    again = make_checkpoint(tmp_path / "again")
    names = sorted(file.name for file in model_dir.iterdir())
    assert sorted(file.name for file in again.iterdir()) == names
    assert all((again / name).read_bytes() == (model_dir / name).read_bytes() for name in names)
    other = make_checkpoint(tmp_path / "other", seed=1)
    different = [name for name in names if (other / name).read_bytes() != (model_dir / name).read_bytes()]
    assert different == [name for name in names if name.endswith(".safetensors")]


def test_dtype(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "half", dtype="bfloat16")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}


def test_the_large_vocabulary_is_whole() -> None:
    preset = PRESETS["bench"]
    tokenizer = train_qwen_tokenizer(preset.tokenizer_size)
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
    assert "supported are qwen3_vl" in capsys.readouterr().err
