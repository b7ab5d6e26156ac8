"""Questions have one right answer, and it follows from what was drawn. It is worked out a second time here."""

from __future__ import annotations

import collections
import io
import random
import re

import pytest
from PIL import Image

from demo.questions import KINDS, ONE_PICTURE, ORDINALS, Question, draw_question, draw_scenes, held_out

QUESTIONS = held_out(seed=5, count=800)
NUMBERS = ["zero", "one", "two", "three", "four"]


def _of(kind: str) -> list[Question]:
    return [question for question in QUESTIONS if question.kind == kind]


def test_a_seed_is_a_question() -> None:
    assert held_out(5, 40) == QUESTIONS[:40]
    assert held_out(6, 40) != QUESTIONS[:40]
    assert draw_question(11) == draw_question(11)
    assert draw_question(11).pictures == draw_question(11).pictures
    assert {draw_question(seed).kind for seed in range(100)} == set(KINDS)


def test_held_out_scenes_are_not_training_s() -> None:
    """Training draws from `random.Random("training …")`, questions from `"held-out …"`; seeds cannot meet."""
    assert random.Random("training 0").random() != random.Random("held-out 0").random()


def test_every_kind_takes_its_turn_and_pictures_are_as_many_as_promised() -> None:
    assert collections.Counter(question.kind for question in QUESTIONS) == dict.fromkeys(KINDS, 100)
    for question in QUESTIONS:
        assert (len(question.scenes) == 1) == (question.kind in ONE_PICTURE)
    assert {len(question.scenes) for question in QUESTIONS} == {1, 2, 3, 4}
    assert {len(scene.things) for question in QUESTIONS for scene in question.scenes} == {1, 2, 3, 4}


def test_pictures_are_png_files_of_the_scenes() -> None:
    question = _of("which")[0]
    assert [Image.open(io.BytesIO(png)).size for png in question.pictures] == [
        (scene.width, scene.height) for scene in question.scenes
    ]
    assert len(question.shows) == len(question.scenes)


def test_what_and_describe_list_from_left_to_right() -> None:
    for question in _of("what") + _of("describe"):
        scene = question.scenes[0]
        if question.kind == "describe":
            match = re.fullmatch(r"Describe the (\w+) picture\.", question.prompt)
            assert match
            scene = question.scenes[ORDINALS.index(match[1])]
        names = [part.split(" ", 1)[1] for part in re.split(r", | and ", question.answer)]
        assert names == [f"{thing.colour} {thing.shape}" for thing in sorted(scene.things, key=lambda thing: thing.x)]
        assert all(part.startswith("an ") == ("an orange" in part) for part in re.split(r", | and ", question.answer))


def test_count() -> None:
    seen = set()
    for question in _of("count"):
        match = re.fullmatch(r"How many (?:(\w+) things|(\w+)) are in the picture\?", question.prompt)
        assert match
        things = question.scenes[0].things
        colour, plural = match.groups()
        if colour:
            number = sum(thing.colour == colour for thing in things)
        elif plural == "things":
            number = len(things)
        else:
            number = sum(plural in (thing.shape + "s", thing.shape + "es") for thing in things)
        assert question.answer == NUMBERS[number], question.prompt
        seen.add(question.answer)
    assert seen == set(NUMBERS)


def test_colour_and_shape_ask_about_the_only_one() -> None:
    for question in _of("colour"):
        shape = question.prompt.removeprefix("What colour is the ").removesuffix("?")
        assert [thing.colour for thing in question.scenes[0].things if thing.shape == shape] == [question.answer]
    for question in _of("shape"):
        colour = question.prompt.split()[4]
        shapes = [thing.shape for thing in question.scenes[0].things if thing.colour == colour]
        assert [f"a {shape}" for shape in shapes] == [question.answer]


def test_where_is_clear() -> None:
    seen = set()
    for question in _of("where"):
        scene = question.scenes[0]
        by_name = {thing.name: thing for thing in scene.things}
        assert sum(thing.name in question.prompt for thing in scene.things) <= 2
        match = re.fullmatch(
            r"Is the (\w+ \w+) (?:in the (left|upper) or \w+ half|(left|above) or .* the (\w+ \w+))\?", question.prompt
        )
        assert match
        name, half, side, other = match.groups()
        x, y = by_name[name].x / scene.width, by_name[name].y / scene.height
        if half:
            off = (x if half == "left" else y) - 0.5
            expected = {"left": ("left", "right"), "upper": ("upper", "lower")}[half][off > 0]
        else:
            off = x - by_name[other].x / scene.width if side == "left" else y - by_name[other].y / scene.height
            expected = {"left": ("left", "right"), "above": ("above", "below")}[side][off > 0]
        assert question.answer == expected
        assert abs(off) >= (0.06 if half else 0.12)
        seen.add(question.answer)
    assert seen == {"left", "right", "upper", "lower", "above", "below"}


def test_which_names_a_thing_of_one_picture_alone() -> None:
    for question in _of("which"):
        name = question.prompt.split(" ", 4)[4].removesuffix("?")
        holders = [i for i, scene in enumerate(question.scenes) if any(thing.name == name for thing in scene.things)]
        assert [f"the {ORDINALS[i]}" for i in holders] == [question.answer]


def test_same_lists_and_then_decides() -> None:
    verdicts: collections.Counter[str] = collections.Counter()
    for question in _of("same"):
        names = [scene.things[0].name for scene in question.scenes]
        listed, verdict = question.answer.split(": ")
        assert [part.split(" ", 1)[1] for part in listed.split(", ")] == names
        if verdict == "no":
            assert len(set(names)) == len(names)
        else:
            match = re.fullmatch(r"yes, the (\w+) and the (\w+)", verdict)
            assert match
            one, other = (ORDINALS.index(word) for word in match.groups())
            assert one < other
            assert names[one] == names[other]
            assert len(set(names)) == len(names) - 1
        verdicts[verdict[:2]] += 1
    assert 25 < verdicts["no"] < 75


def test_sizes_that_are_given_are_kept() -> None:
    sizes = [(96, 224), (120, 120), (200, 101)]
    for kind in ("which", "same", "describe"):
        scenes = draw_scenes(random.Random(1), kind, 3, sizes)
        assert [(scene.width, scene.height) for scene in scenes] == sizes


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="kind 'why': known are what, count"):
        draw_question(1, "why")
