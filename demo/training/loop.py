"""The training run: batches through the curriculum, states saved on the way, a checkpoint at the end.

All chance comes from the run's seed and the number of the step, so a run that was stopped and resumed is the run that
was not stopped.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from core.errors import ConfigError
from demo.training.batches import BatchMaker
from demo.training.checkpoint import SIZES, Sizes, new_model, write_files, write_weights
from demo.training.curriculum import (
    QUESTIONS_SEVERAL,
    STAGES,
    WEIGHT_CELLS,
    WEIGHT_NUMBERS,
    WEIGHT_SEVERAL,
    WEIGHT_THINGS,
    WEIGHT_VERDICTS,
    Stage,
)
from demo.training.forward import BatchedModel
from demo.training.lessons import Lessons, Tally
from demo.training.state import load_state, save_state
from demo.training.workers import Workers

_WARM_UP = 40  # steps to the full learning rate
_CLIP = 1.0
_MEMORY = 0.96  # of the moving averages of accuracy
_FIRST_STEPS = 40  # of a stage; its averages mean nothing before
_EVERY = 20  # steps between two points of the plots


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a run."""

    model_dir: Path
    state_file: Path
    seed: int = 0
    device: str = "cpu"
    learning_rate: float = 6e-3  # of the matrices; Muon's, in the scale of AdamW's
    other_rate: float = 2e-3  # of embeddings, norms and biases; AdamW's
    save_every: int = 100
    stages: Sequence[Stage] = STAGES
    sizes: Sizes = SIZES


class Run:
    """One training run, new or from its saved state. For one thread.

    With several workers each has a `Run` of the same settings, which takes its part of every batch; the first one
    writes. Runs with another number of workers draw other pictures.
    """

    def __init__(self, settings: Settings, resume: bool, workers: Workers | None = None) -> None:
        self.settings = settings
        self._workers = workers or Workers(rank=0, number=1)
        self._device = torch.device(settings.device)
        tokenizer = write_files(settings.model_dir, settings.sizes)  # the same from every worker
        self.model = new_model(settings.model_dir, settings.seed).to(self._device)
        self._maker = BatchMaker(tokenizer, settings.sizes.patch_size)
        self._lessons = Lessons(BatchedModel(self.model), settings.sizes.text_hidden).to(self._device)
        self._optimizers = _optimizers(self._lessons)
        self.step = 0
        self.stage = 0
        self._began = 0  # step at which the stage began
        self._averages: dict[str, float] = {}
        self._seconds = 0.0
        self.history: list[dict[str, Any]] = []
        if resume and settings.state_file.is_file():
            self._resume()

    @property
    def finished(self) -> bool:
        return self.stage == len(self.settings.stages)

    def train(self, max_steps: int | None = None, progress: bool = True) -> None:
        """Go on to the end, or for so many steps. The state is saved at intervals and at the end."""
        stop = None if max_steps is None else self.step + max_steps
        total = sum(stage.max_steps for stage in self.settings.stages)
        hidden = not progress or self._workers.rank > 0
        with tqdm(total=total, initial=self.step, disable=hidden, unit="step", mininterval=5.0) as bar:
            while not self.finished and self.step != stop:
                before = time.monotonic()
                loss = self._advance()
                self._seconds += time.monotonic() - before
                bar.update()
                if self.step % _EVERY == 0:
                    self._note(loss)
                    bar.set_description(self._describe(loss), refresh=False)
                if self._stage_is_over():
                    self._averages = dict.fromkeys(self._averages, 0.0)
                    self.stage += 1
                    self._began = self.step
                    if self._workers.rank == 0:
                        write_weights(self.settings.model_dir, self.model)
                    self._save()
                elif self.step % self.settings.save_every == 0:
                    self._save()
        self._save()

    def _advance(self) -> float:
        """One step; its loss."""
        stage = self.settings.stages[self.stage]
        self._set_rates(stage)
        seed = f"{self.settings.seed} {self.step} {self._workers.rank}/{self._workers.number}"
        total = 0.0
        tallies: list[Tally] = []
        for name, count in _counts(stage).items():
            if share := count // self._workers.number:
                with torch.autocast(self._device.type, torch.bfloat16):
                    loss, tally = self._lesson(name, f"{seed} {name}", stage, share)
                loss.backward()
                total += loss.item()
                tallies.append(tally)
        self._workers.average(
            [parameter.grad for parameter in self._lessons.parameters() if parameter.grad is not None]
        )
        torch.nn.utils.clip_grad_norm_(self._lessons.parameters(), _CLIP)
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self._remember(self._workers.add(tallies))
        return total

    def _lesson(self, name: str, seed: str, stage: Stage, count: int) -> tuple[torch.Tensor, Tally]:
        if name == "looks":
            looks = self._maker.looks(seed, count, stage.looks_side, stage.looks_things)
            loss, tally = self._lessons.look(looks.to(self._device))
            return (loss if stage.one == 0 else WEIGHT_CELLS * loss), tally
        if name == "verdicts":
            loss, repeats, tally = self._lessons.judge(self._maker.verdicts(seed, count).to(self._device))
            return WEIGHT_VERDICTS * (loss + repeats if stage.repeats else loss), tally
        if name == "one":
            batch = self._maker.one_picture(
                seed, count, stage.one_kinds, stage.one_side, stage.one_things, stage.one_least
            )
            weight = 1.0
        else:
            batch = self._maker.several_pictures(seed, count, QUESTIONS_SEVERAL, stage.several_side)
            weight = WEIGHT_SEVERAL
        losses, tally = self._lessons.answer(batch.to(self._device))
        loss = weight * losses.answers + WEIGHT_CELLS * losses.cells
        if stage.numbers and name == "several":
            loss = loss + WEIGHT_NUMBERS * losses.numbers
        if stage.things:
            loss = loss + WEIGHT_THINGS * losses.things
        if stage.asked:
            loss = loss + WEIGHT_THINGS * losses.asked
        if stage.repeats and name == "several":
            loss = loss + WEIGHT_THINGS * losses.repeats
        return loss, tally

    def _remember(self, tally: Tally) -> None:
        for name, (right, asked) in tally.items():
            if asked:
                average = self._averages.get(name, 0.0)
                self._averages[name] = _MEMORY * average + (1 - _MEMORY) * right / asked

    def _stage_is_over(self) -> bool:
        stage = self.settings.stages[self.stage]
        steps = self.step - self._began
        if steps >= stage.max_steps:
            return True
        mastered = all(self._averages.get(name, 0.0) >= goal for name, goal in stage.goals.items())
        return bool(stage.goals) and mastered and steps >= _FIRST_STEPS

    def _set_rates(self, stage: Stage) -> None:
        factor = min(1.0, (self.step + 1) / _WARM_UP)
        passed = (self.step - self._began) / stage.max_steps
        last_rate = stage.rate if stage.last_rate is None else stage.last_rate
        factor *= stage.rate + (last_rate - stage.rate) * passed
        rates = {"matrices": self.settings.learning_rate, "others": self.settings.other_rate}
        for name, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rates[name] * factor

    def _note(self, loss: float) -> None:
        accuracy = {name: round(value, 4) for name, value in sorted(self._averages.items())}
        point = {"step": self.step, "seconds": round(self._seconds, 1), "loss": round(loss, 4), "accuracy": accuracy}
        self.history.append({**point, "stage": self.settings.stages[self.stage].name})

    def _describe(self, loss: float) -> str:
        accuracy = " ".join(f"{name} {value:.2f}" for name, value in sorted(self._averages.items()) if value)
        return f"{self.settings.stages[self.stage].name}: loss {loss:.2f}, {accuracy}"

    def _save(self) -> None:
        if self._workers.rank > 0:
            return
        progress = {
            "seed": self.settings.seed,
            "workers": self._workers.number,
            "step": self.step,
            "stage": self.stage,
            "began": self._began,
            "averages": self._averages,
            "seconds": self._seconds,
            "history": self.history,
        }
        save_state(self.settings.state_file, self._lessons, self._optimizers, progress)

    def _resume(self) -> None:
        progress = load_state(self.settings.state_file, self._lessons, self._optimizers)
        for name, given in (("seed", self.settings.seed), ("workers", self._workers.number)):
            if progress[name] != given:
                raise ConfigError(f"--{name}", given, f"the saved run has {progress[name]}; --anew begins another")
        self.step, self.stage, self._began = progress["step"], progress["stage"], progress["began"]
        self._averages, self._seconds = progress["averages"], progress["seconds"]
        self.history = progress["history"]


def keep_memory() -> None:
    """Let glibc keep freed memory: by default each large tensor is fetched from the kernel anew, page by page, which on
    a CPU costs more than the arithmetic. Does nothing elsewhere."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def _counts(stage: Stage) -> dict[str, int]:
    """Of each lesson in a step."""
    return {"looks": stage.looks, "one": stage.one, "several": stage.several, "verdicts": stage.verdicts}


def _optimizers(lessons: Lessons) -> dict[str, Any]:
    """Muon for the hidden matrices, AdamW for all else."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in lessons.named_parameters():
        hidden = parameter.ndim == 2 and not any(part in name for part in ("embed", "heads", "lm_head"))
        (matrices if hidden else others).append(parameter)
    return {
        "matrices": torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        "others": torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    }
