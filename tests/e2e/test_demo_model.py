"""The whole stack measured on meaning: the demo model's answers through router, encoder, prefill and decode."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cluster import LocalCluster
from core.keys import content_hash, item_key
from demo.answers import TransformersAnswers, TriptychAnswers
from demo.evaluate import MODEL, score
from demo.questions import KINDS, Question, ask, draw_scenes, held_out
from tests.e2e.conftest import Cluster

SEED = 20
#: Pictures of one size have equally many embeddings, so that nothing but their meaning tells them apart.
SIZE = (160, 160)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """As `make demo` starts it: no --model, bf16."""
    with LocalCluster(log_dir=tmp_path_factory.mktemp("demo-logs")) as local:
        yield local


def ask_all(router: str, questions: list[Question]) -> list[str]:
    triptych = TriptychAnswers(router)
    try:
        return [triptych.answer(question) for question in questions]
    finally:
        triptych.close()


def test_sixty_questions_of_all_kinds(served: LocalCluster) -> None:
    questions = held_out(SEED, 60)
    assert {question.kind for question in questions} == set(KINDS)
    answers = ask_all(served.router, questions)
    scores = score(questions, answers)
    assert scores["one picture"].share >= 0.94, {name: str(value) for name, value in scores.items()}
    assert scores["several pictures"].share >= 0.9, {name: str(value) for name, value in scores.items()}
    transformers = TransformersAnswers(MODEL, "bfloat16")
    theirs = [transformers.answer(question) for question in questions]
    assert sum(ours == other for ours, other in zip(answers, theirs, strict=True)) >= 59
    there = Cluster(served)
    there.assert_no_failures()


def test_in_float32_the_answers_are_those_of_transformers(tmp_path: Path) -> None:
    questions = held_out(SEED + 1, 16)
    transformers = TransformersAnswers(MODEL, "float32")
    with LocalCluster(service_args=["--dtype=float32"], log_dir=tmp_path) as local:
        assert ask_all(local.router, questions) == [transformers.answer(question) for question in questions]


def test_swapped_embeddings_show_in_the_answers(tmp_path: Path) -> None:
    """The stick measures: two pictures swapped inside a connector, everything else being right, make answers wrong."""
    swaps_path = tmp_path / "swaps.json"
    swaps_path.write_text("{}")
    extra = {"shared_storage_path": str(tmp_path / "items"), "swaps_path": str(swaps_path)}
    with LocalCluster(
        service_args=[
            "--ec-connector=SwappingConnector",
            "--ec-connector-module-path=tests.e2e.swapping_connector",
            f"--ec-connector-extra-config={json.dumps(extra)}",
        ],
        log_dir=tmp_path / "logs",
    ) as local:
        namespace = Cluster(local).info("encoder").namespace_digest
        right, wrong = several(1, 24), several(2, 24)
        shares = {}
        for name, questions in (("as they are", right), ("swapped", wrong)):
            swaps: dict[str, str] = {}
            if name == "swapped":
                for question in questions:
                    one, other = (item_key(content_hash(image), namespace) for image in question.pictures[:2])
                    swaps |= {one: other, other: one}
            swaps_path.write_text(json.dumps(swaps))
            shares[name] = score(questions, ask_all(local.router, questions))["several pictures"].share
    assert shares["as they are"] >= 0.9, shares
    assert shares["swapped"] <= 0.5, shares


def several(seed: int, count: int) -> list[Question]:
    """Questions over two pictures of one size, whose answer is another when they are swapped."""
    rng = random.Random(f"swapped {seed}")
    questions: list[Question] = []
    while len(questions) < count:
        kind = ("which", "describe")[len(questions) % 2]
        scenes = draw_scenes(rng, kind, 2, [SIZE] * 2)
        asked = ask(rng, kind, scenes)
        if asked is not None and ask(random.Random(0), "describe", scenes) != ask(
            random.Random(0), "describe", scenes[::-1]
        ):
            questions.append(Question(kind, tuple(scenes), *asked))
    return questions
