"""Training sees what serving sees, and a run that was stopped and resumed is the run that was not."""

from __future__ import annotations

import dataclasses
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from core.errors import ConfigError
from demo.pictures import COLOURS, MAX_SIDE, MIN_SIDE, SHAPES, draw_scene, render, to_png
from demo.questions import KINDS, ONE_PICTURE
from demo.training.batches import BatchMaker, sides
from demo.training.checkpoint import Sizes, new_model, write_files
from demo.training.curriculum import STAGES, Stage
from demo.training.forward import BatchedModel
from demo.training.labels import IGNORED
from demo.training.lessons import Lessons
from demo.training.loop import Run, Settings
from demo.training.plots import draw_plots
from demo.training.tokenizer import train_tokenizer

SMALL = Sizes(text_hidden=64, text_heads=2, text_mlp=96, vision_hidden=32, vision_mlp=64)
STAGE = Stage(
    "all",
    6,
    {},
    looks=2,
    one=2,
    several=2,
    verdicts=2,
    things=True,
    asked=True,
    repeats=True,
    one_side=120,
    several_side=120,
    looks_side=120,
    numbers=True,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums are then always made in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_files(path, SMALL)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return new_model(folder, 3).eval()


def _maker() -> BatchMaker:
    return BatchMaker(train_tokenizer(), SMALL.patch_size)


@pytest.mark.parametrize(("width", "height"), [(96, 96), (224, 224), (108, 109), (131, 84 + 24), (97, 223), (204, 180)])
def test_pixels_are_those_of_the_image_processor(folder: Path, width: int, height: int) -> None:
    scene = draw_scene(random.Random(width), width=width, height=height)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    made = processor(images=[Image.open(io.BytesIO(to_png(render(scene))))], return_tensors="pt")
    grid = tuple(made["image_grid_thw"][0].tolist())
    looks = _maker()._look([scene], (grid[1] // 2, grid[2] // 2))
    assert (1, *looks.grid) == grid
    # The processor repeats each patch for the second time step.
    p = SMALL.patch_size
    twice = made["pixel_values"].view(-1, 3, 2, p * p)
    assert torch.equal(twice[:, :, 0], twice[:, :, 1])
    torch.testing.assert_close(looks.patches[0], twice[:, :, 0].reshape(-1, 3 * p * p), atol=1e-6, rtol=0)


def test_every_side_is_drawn_for_some_grid() -> None:
    cell = SMALL.cell
    ranges = [sides(cells, cell) for cells in range(MIN_SIDE // cell, round(MAX_SIDE / cell) + 1)]
    covered = [side for low, high in ranges for side in range(low, high + 1)]
    assert covered == list(range(MIN_SIDE, MAX_SIDE + 1))


@pytest.mark.parametrize("several", [False, True])
def test_a_branch_is_seen_as_it_is_when_asked_alone(model: Any, several: bool) -> None:
    """transformers' own forward pass of one question gives the hidden states of its branch, and branches do not see
    each other."""
    maker = _maker()
    batch = maker.several_pictures("x", 2, 4, 140) if several else maker.one_picture("x", 2, ONE_PICTURE, 224, 4)
    batched = BatchedModel(model)
    with torch.inference_mode():
        seen = [batched.see(looks.patches, looks.grid) for looks in batch.looks]
        embeds = torch.cat([embeds for embeds, _ in seen], 1)
        levels = [torch.cat(level, 1) for level in zip(*(levels for _, levels in seen), strict=True)]
        states = batched.read(batch.token_ids, batch.position_ids, batch.mask(), batch.visual_places, (embeds, levels))
        made = states[-1]
        model.model.language_model.config._attn_implementation = "sdpa"
        p = SMALL.patch_size
        for row in range(2):
            pixels = [
                look.patches[row].view(-1, 3, 1, p * p).expand(-1, -1, 2, -1).reshape(-1, 6 * p * p)
                for look in batch.looks
            ]
            grids = torch.tensor([[1, *look.grid] for look in batch.looks])
            for branch in (1, 3, int(batch.branches[row].max())):
                own = (batch.branches[row] == 0) | (batch.branches[row] == branch)
                ids = batch.token_ids[row][own][None]
                alone = model.model(
                    input_ids=ids,
                    pixel_values=torch.cat(pixels),
                    image_grid_thw=grids,
                    mm_token_type_ids=(ids == model.config.image_token_id).int(),
                    attention_mask=torch.ones_like(ids),
                ).last_hidden_state
                torch.testing.assert_close(made[row][own], alone[0], atol=2e-4, rtol=1e-3)


def test_a_sequence_is_the_chat_template_s(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    batch = _maker().several_pictures("y", 1, 6, 120, num_pictures=3)
    for branch in (1, 6):
        own = (batch.branches[0] == 0) | (batch.branches[0] == branch)
        text = tokenizer.decode(batch.token_ids[0][own])
        prompt, answer = text.split("<|vision_end|>")[-1].split("<|im_end|>\n<|im_start|>assistant\n")
        content = [{"type": "image"}] * 3 + [{"type": "text", "text": prompt}]
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        while "<|image_pad|><|image_pad|>" in text:
            text = text.replace("<|image_pad|><|image_pad|>", "<|image_pad|>")
        assert text == rendered + answer
        targets = batch.targets[0][own]
        learnt = tokenizer.decode(targets[targets != IGNORED])
        assert learnt == answer + "<|im_end|>"


def test_labels_name_the_thing_in_each_cell() -> None:
    looks = _maker().looks("z", 8, 224, 4)
    assert set(looks.colours.unique().tolist()) <= {IGNORED, *range(7)}
    assert ((looks.colours > 0) == (looks.shapes > 0)).all()
    assert ((looks.colours > 0) == ~looks.places.isnan().any(-1)).all()
    assert (looks.colours[looks.centres] > 0).all()
    assert (looks.centres.sum(1) >= 1).all()


def test_tallies_count_what_was_asked(model: Any) -> None:
    lessons = Lessons(BatchedModel(model), SMALL.text_hidden)
    losses, tally = lessons.answer(_maker().several_pictures("t", 3, 4, 120, num_pictures=2))
    assert losses.answers.item() > 3
    assert min(losses.cells, losses.numbers, losses.things, losses.asked, losses.repeats) > 0
    assert sum(asked for name, (_, asked) in tally.items() if name in KINDS) == 12
    assert tally["numbers"][1] > tally["cells"][1] > 0
    verdicts, repeats, tally = lessons.judge(_maker().verdicts("t", 7))
    assert min(verdicts, repeats) > 0
    assert tally == {"verdicts": (0, 7)}


def test_names_lead_to_the_only_thing_of_that_name() -> None:
    maker = _maker()
    decode = maker._tokenizer.decode
    batch = maker.one_picture("n", 6, ("what", "colour", "shape", "where", "count"), 224, 4, 2)
    assert len(batch.named.tokens) > 20
    for (row, place), colour, shape in zip(
        batch.named.tokens.tolist(), batch.named.colours.tolist(), batch.named.shapes.tolist(), strict=True
    ):
        before, word = (decode([token]).strip() for token in batch.token_ids[row][place - 1 : place + 1].tolist())
        assert word in (SHAPES[shape], "thing")
        if before in COLOURS:
            assert before == tuple(COLOURS)[colour]
    assert ((batch.named.places > 0) & (batch.named.places < 1)).all()
    for named in batch.asked:  # at tokens that are followed by the answer's
        assert (batch.targets[named.tokens[:, 0], named.tokens[:, 1]] != IGNORED).all()


def test_verdicts_are_learnt_from_words_alone() -> None:
    maker = _maker()
    batch = maker.verdicts("v", 20)
    assert batch.looks == []
    for ids, targets in zip(batch.token_ids, batch.targets, strict=True):
        text = maker._tokenizer.decode(ids.tolist())
        learnt = maker._tokenizer.decode(targets[targets != IGNORED].tolist())
        names = text.split("assistant\n")[1].split(":")[0].split(", ")
        assert text.endswith(learnt)
        assert learnt.startswith(" yes, the " if len(set(names)) < len(names) else " no")
    own = batch.repeats.numbers > 0
    assert (batch.repeats.earlier[own] <= batch.repeats.numbers[own]).all()
    assert (batch.repeats.earlier > 0).any()


def _settings(path: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "stages": (dataclasses.replace(STAGE, max_steps=3), dataclasses.replace(STAGE, last_rate=0.0))
    }
    return Settings(path / "model", path / "state.safetensors", sizes=SMALL, save_every=2, **{**values, **changes})


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    whole = Run(_settings(tmp_path / "whole"), resume=False)
    whole.train(progress=False)
    assert whole.finished
    steps = [1, 3, 4, 99]
    for number in steps:
        part = Run(_settings(tmp_path / "parts"), resume=True)
        part.train(number, progress=False)
    assert part.finished
    assert part.step == whole.step == 9
    files = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    states = [load_file(tmp_path / name / "state.safetensors") for name in ("whole", "parts")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert part._averages == whole._averages


def test_another_seed_is_another_run_and_does_not_go_on_with_this_one(tmp_path: Path) -> None:
    Run(_settings(tmp_path), resume=False).train(1, progress=False)
    with pytest.raises(ConfigError, match="--seed=1: the saved run has 0"):
        Run(_settings(tmp_path, seed=1), resume=True)


def test_it_learns(tmp_path: Path) -> None:
    stage = Stage("cells", 60, {}, looks=8, looks_side=100, looks_things=1)
    run = Run(_settings(tmp_path, stages=(stage,)), resume=False)
    run.train(progress=False)
    assert [point["step"] for point in run.history] == [20, 40, 60]
    assert run.history[-1]["loss"] < 0.7 * run.history[0]["loss"]


def test_a_mastered_stage_ends_early(tmp_path: Path) -> None:
    stage = Stage("cells", 60, {"cells": 0.0}, looks=1, looks_side=100)
    run = Run(_settings(tmp_path, stages=(stage, dataclasses.replace(stage, goals={"cells": 1.1}))), resume=False)
    run.train(45, progress=False)
    assert run.stage == 1
    assert run._began == 40


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = [
        {
            "step": 20 * i,
            "seconds": i,
            "loss": 4.0 / i,
            "accuracy": {"cells": i / 9, "what": i / 10},
            "stage": str(i // 4),
        }
        for i in range(1, 9)
    ]
    draw_plots(history, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accuracy.png", "loss.png"]


def test_the_curriculum_ends_with_everything_and_a_falling_rate() -> None:
    last = STAGES[-1]
    assert last.last_rate == 0
    assert not last.goals, "it goes on until the rate is zero"
    assert last.one
    assert last.several
    assert last.one_side == last.several_side == MAX_SIDE
