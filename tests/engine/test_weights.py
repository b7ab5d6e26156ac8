"""Loading a part of a checkpoint, and the digest that stands for all of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from core.errors import ConfigError
from engine.models.weights import load_weights, weight_files, weights_digest

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: a layer that is wanted, and one of a part that is not."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "x"}')
    torch.manual_seed(0)
    parts = {
        "a.safetensors": {"text.weight": torch.randn(3, 2), "vision.weight": torch.randn(100, 4)},
        "b.safetensors": {"text.bias": torch.randn(3)},
    }
    for name, tensors in parts.items():
        save_file(tensors, model / name)
    weight_map = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return model


def layer() -> nn.Linear:
    return nn.Linear(2, 3, device="meta")


def rename(name: str) -> tuple[str, str] | None:
    return ("text", name.removeprefix("text.")) if name.startswith("text.") else None


def load(folder: Path, module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    report = load_weights(weight_files(folder), {"text": module}, rename, dtype=dtype, device=CPU)
    return report.loaded_bytes, report.skipped_bytes


def test_only_what_is_wanted_is_loaded(folder: Path) -> None:
    module = layer()
    assert load(folder, module) == (4 * 9, 4 * 400)
    torch.manual_seed(0)
    assert torch.equal(module.weight, torch.randn(3, 2))
    assert not any(p.is_meta or p.requires_grad for p in module.parameters())


def test_weights_are_converted_and_are_our_own(folder: Path) -> None:
    module = layer()
    load(folder, module, torch.bfloat16)
    assert module.weight.dtype is torch.bfloat16
    plain = layer()
    load(folder, plain)
    before = plain.weight.clone()
    with (folder / "a.safetensors").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size - 800)
        file.write(bytes(800))
    assert torch.equal(plain.weight, before), "a file that is overwritten changes the weights that serve"


def cut_short(folder: Path) -> None:
    data = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(data[:-1])


def other_shape(folder: Path) -> None:
    save_file({"text.bias": torch.zeros(4)}, folder / "b.safetensors")


def one_absent(folder: Path) -> None:
    save_file({"other": torch.zeros(4)}, folder / "b.safetensors")


def broken_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": 3}')


def file_gone(folder: Path) -> None:
    (folder / "b.safetensors").unlink()


def file_elsewhere(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"text.weight": "../config.json"}}))


def nothing(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "a.safetensors cannot be read"),
        (other_shape, r"weight text.bias has shape \[4\], the configuration asks for \[3\]"),
        (one_absent, r"has no weights for text.bias \(1 missing\)"),
        (broken_index, "is not a weight index"),
        (file_gone, "has no weight file b.safetensors"),
        (file_elsewhere, "has no weight file"),
        (nothing, "has no weight file model.safetensors"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, damage: object, words: str) -> None:
    assert callable(damage)
    damage(folder)
    with pytest.raises(ConfigError, match=words) as caught:
        load(folder, layer())
    assert caught.value.name == "--model"


def flip(file: Path, keep_time: bool) -> None:
    """Change one bit of the last byte; the size stays, and the time too if wanted."""
    stat = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    time_ns = stat.st_mtime_ns + (0 if keep_time else 1_000_000)
    os.utime(file, ns=(time_ns, time_ns))


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "b.safetensors"])
def test_one_bit_makes_another_digest(folder: Path, tmp_path: Path, name: str) -> None:
    files, cache = weight_files(folder), tmp_path / "cache"
    before = weights_digest(folder, files, cache)
    assert len(before) == 64
    assert weights_digest(folder, files, cache) == before
    flip(folder / name, keep_time=False)
    assert weights_digest(folder, files, cache) != before
    flip(folder / name, keep_time=False)
    assert weights_digest(folder, files, cache) == before


def test_a_second_start_reads_no_weights(folder: Path, tmp_path: Path) -> None:
    """Told apart by a change that leaves size and time alone, which only reading could find."""
    files, cache = weight_files(folder), tmp_path / "cache"
    before = weights_digest(folder, files, cache)
    flip(files[0], keep_time=True)
    assert weights_digest(folder, files, cache) == before
    assert weights_digest(folder, files, tmp_path / "other cache") != before


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_a_memory_that_cannot_be_read_is_made_again(folder: Path, tmp_path: Path, content: bytes) -> None:
    files, cache = weight_files(folder), tmp_path / "cache"
    before = weights_digest(folder, files, cache)
    for entry in cache.iterdir():
        entry.write_bytes(content)
    assert weights_digest(folder, files, cache) == before


def test_a_memory_that_cannot_be_written_does_no_harm(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = weight_files(folder)
    assert weights_digest(folder, files, tmp_path / "file" / "cache") == weights_digest(folder, files, tmp_path / "c")
