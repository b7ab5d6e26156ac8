"""How many held-out questions the demo model answers rightly, word for word.

    python -m demo.evaluate --seed N --questions 1000 [--model DIR] [--dtype D] [--router HOST:PORT]

Without `--router` transformers answers; with it, transformers and a running Triptych both do, and what they agree on is
counted. Held-out questions come from other random numbers than training's, whatever the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import grpc
from tqdm import tqdm

from cli.client import describe
from demo.answers import TransformersAnswers, TriptychAnswers
from demo.questions import KINDS, ONE_PICTURE, SEVERAL_PICTURES, Question, held_out

MODEL = Path(__file__).resolve().parent / "model"


@dataclass(frozen=True, slots=True)
class Score:
    """Right answers of those asked."""

    right: int
    asked: int

    @property
    def share(self) -> float:
        return self.right / self.asked if self.asked else 0.0

    def __str__(self) -> str:
        return f"{self.right}/{self.asked} = {100 * self.share:.1f} %"


def score(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, Score]:
    """By kind, and by `one picture` and `several pictures`."""
    groups = {kind: (kind,) for kind in KINDS} | {"one picture": ONE_PICTURE, "several pictures": SEVERAL_PICTURES}
    scores = {}
    for name, kinds in groups.items():
        pairs = [(q.answer, given) for q, given in zip(questions, answers, strict=True) if q.kind in kinds]
        scores[name] = Score(sum(answer == given for answer, given in pairs), len(pairs))
    return scores


@click.command(help=__doc__.splitlines()[0])
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the questions.")
@click.option("--questions", "count", type=click.IntRange(1, 1_000_000), default=1000, show_default=True)
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=MODEL, help="Checkpoint folder."
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--router", metavar="HOST:PORT", help="A running Triptych that serves the same model, asked as well.")
@click.option("--wrong", "show_wrong", is_flag=True, help="Print each question that was answered wrongly.")
def main(seed: int, count: int, model: Path, dtype: str, router: str | None, show_wrong: bool) -> None:
    """Ask, and print the scores."""
    questions = held_out(seed, count)
    transformers = TransformersAnswers(model, dtype)
    answers = [transformers.answer(question) for question in tqdm(questions, desc="transformers", unit="question")]
    print(f"{count} held-out questions of seed {seed}, {dtype}")
    _print(score(questions, answers), "transformers")
    if show_wrong:
        for question, given in zip(questions, answers, strict=True):
            if given != question.answer:
                print(f"{question.prompt} {given!r}, not {question.answer!r}; {' | '.join(question.shows)}")
    if router is None:
        return
    triptych = TriptychAnswers(router)
    try:
        served = [triptych.answer(question) for question in tqdm(questions, desc="Triptych", unit="question")]
    except grpc.RpcError as error:
        raise click.ClickException(f"--router {router}: {describe(error)}") from error
    finally:
        triptych.close()
    _print(score(questions, served), "Triptych")
    equal = sum(one == other for one, other in zip(answers, served, strict=True))
    print(f"equal answers: {Score(equal, count)}")


def _print(scores: dict[str, Score], who: str) -> None:
    print(f"\n{who}")
    for name, value in scores.items():
        if value.asked:
            print(f"  {name:18}{value}")


if __name__ == "__main__":
    main()
