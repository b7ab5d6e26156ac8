"""What is learnt when: from cells of single pictures to questions about several, each stage until it is mastered."""

from __future__ import annotations

from dataclasses import dataclass

from demo.pictures import MAX_SIDE, MAX_THINGS
from demo.questions import ONE_PICTURE, SEVERAL_PICTURES


@dataclass(frozen=True, slots=True)
class Stage:
    """Counts are per step, over all workers. Sides in pixels."""

    name: str
    max_steps: int  # it ends here, mastered or not
    goals: dict[str, float]  # by lesson: moving averages that end the stage; none ends it by `max_steps` alone
    looks: int = 0  # pictures for the tower alone
    looks_side: int = MAX_SIDE
    looks_things: int = MAX_THINGS
    one: int = 0  # sequences of one picture
    one_side: int = MAX_SIDE
    one_things: int = MAX_THINGS
    one_least: int = 1  # things in a picture
    one_kinds: tuple[str, ...] = (*ONE_PICTURE, "what", "count", "colour")  # asked about each
    several: int = 0  # sequences of several pictures
    several_side: int = MAX_SIDE
    verdicts: int = 0  # sequences whose pictures are given in words
    numbers: bool = False  # the number of its picture is read from each embedding
    things: bool = False  # what a thing is and where is read from its name
    asked: bool = False  # and once more from the answers about it
    repeats: bool = False  # and from names in lists which one they repeat
    rate: float = 1.0  # times the learning rates
    last_rate: float | None = None  # to which it goes, step by step; None: it stays


QUESTIONS_SEVERAL = 6  # about several pictures in a sequence

_LAST = ("what", "count", "count", "colour", "shape", "where", "where", "where")
_LOOKUPS = ("what", "count", "colour", "colour", "colour", "shape", "where", "where")

STAGES = (
    Stage("cells", 600, {"cells": 0.85}, looks=48, looks_side=160, looks_things=3),
    Stage("one picture", 600, dict.fromkeys(ONE_PICTURE, 0.75), looks=16, one=16, one_side=144, one_things=2),
    Stage(
        "several pictures",
        350,
        {**dict.fromkeys(ONE_PICTURE, 0.85), **dict.fromkeys(SEVERAL_PICTURES, 0.75)},
        looks=8,
        one=16,
        one_side=176,
        several=8,
        several_side=144,
    ),
    Stage(
        "numbered pictures",
        350,
        {**dict.fromkeys(ONE_PICTURE, 0.9), **dict.fromkeys(SEVERAL_PICTURES, 0.85)},
        one=12,
        one_side=176,
        several=12,
        several_side=144,
        numbers=True,
        rate=0.6,
    ),
    # To find a thing by its shape, and to say where it is, comes last.
    Stage(
        "lookups",
        250,
        {**dict.fromkeys(ONE_PICTURE, 0.95), **dict.fromkeys(SEVERAL_PICTURES, 0.9)},
        one=16,
        one_side=176,
        one_least=2,
        one_kinds=_LOOKUPS,
        several=10,
        several_side=144,
        numbers=True,
        rate=0.6,
    ),
    Stage(
        "named things",
        200,
        {**dict.fromkeys(ONE_PICTURE, 0.97), **dict.fromkeys(SEVERAL_PICTURES, 0.95)},
        one=16,
        one_side=176,
        one_kinds=_LOOKUPS,
        several=10,
        several_side=144,
        numbers=True,
        things=True,
        rate=0.6,
    ),
    Stage("all sizes", 200, {}, one=16, several=8, numbers=True, things=True, rate=0.5, last_rate=0.375),
    Stage(
        "answers",
        300,
        {**dict.fromkeys(ONE_PICTURE, 0.97), **dict.fromkeys(SEVERAL_PICTURES, 0.95)},
        one=16,
        one_side=176,
        one_kinds=_LOOKUPS,
        several=10,
        several_side=144,
        numbers=True,
        things=True,
        asked=True,
        rate=0.6,
    ),
    Stage(
        "all sizes again",
        100,
        {},
        one=16,
        one_kinds=_LAST,
        several=10,
        numbers=True,
        things=True,
        asked=True,
        rate=0.5,
        last_rate=0.5 * 6 / 7,
    ),
    Stage(
        "verdicts",
        200,
        {},
        one=16,
        one_kinds=_LAST,
        several=10,
        verdicts=64,
        numbers=True,
        things=True,
        asked=True,
        rate=0.5,
        last_rate=0.5 * 4 / 6,
    ),
    Stage(
        "repeats",
        200,
        {},
        one=12,
        one_kinds=_LAST,
        several=10,
        verdicts=64,
        numbers=True,
        things=True,
        asked=True,
        repeats=True,
        rate=0.45,
        last_rate=0.45 * 160 / 360,
    ),
    # Words alone are quick to read: many lists, and of pictures as many as keep what was learnt about them.
    Stage(
        "lists",
        200,
        {"verdicts": 0.97},
        one=4,
        one_kinds=_LAST,
        several=4,
        verdicts=128,
        numbers=True,
        things=True,
        asked=True,
        repeats=True,
        rate=0.6,
    ),
    Stage(
        "all",
        220,
        {},
        one=12,
        one_kinds=_LAST,
        several=10,
        verdicts=32,
        numbers=True,
        things=True,
        asked=True,
        repeats=True,
        rate=0.45,
        last_rate=0.0,
    ),
)

#: Weights of losses beside that of answers about one picture.
WEIGHT_SEVERAL = 0.8
WEIGHT_CELLS = 0.25
WEIGHT_NUMBERS = 0.3
WEIGHT_THINGS = 0.2
WEIGHT_VERDICTS = 0.5
