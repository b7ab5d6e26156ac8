"""Questions about drawn pictures, and their only right answers.

Five kinds are about one picture: `what`, `count`, `colour`, `shape`, `where`. Three are about two to four: `which`,
`same`, `describe`. A question is asked only where its answer is beyond doubt: a thing that is named is the only one of
that name, and what is compared differs by a margin.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo.pictures import COLOURS, SHAPES, Scene, Thing, draw_scene, render, to_png

ONE_PICTURE = ("what", "count", "colour", "shape", "where")
SEVERAL_PICTURES = ("which", "same", "describe")
KINDS = ONE_PICTURE + SEVERAL_PICTURES

MAX_PICTURES = 4
#: What a picture among several shows at most, by kind of question.
_MOST_THINGS = {"which": 3, "describe": 3, "same": 1}

NUMBERS = ("zero", "one", "two", "three", "four")
ORDINALS = ("first", "second", "third", "fourth")
_PLURALS = {shape: shape + ("es" if shape == "cross" else "s") for shape in SHAPES}
#: Of width or height: what is called left or right, above or below, differs by this much.
_MARGIN = 0.12

#: (prompt, answer)
Asked = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with all that is needed to ask it and to judge the answer."""

    kind: str
    scenes: tuple[Scene, ...]
    prompt: str
    answer: str

    @property
    def pictures(self) -> list[bytes]:
        """PNG files, in the order in which they are shown. Painted anew at each call."""
        return [to_png(render(scene)) for scene in self.scenes]

    @property
    def shows(self) -> list[str]:
        """What each picture shows, for people."""
        return [scene.description for scene in self.scenes]


def draw_question(seed: int, kind: str | None = None) -> Question:
    """A held-out question: always the same for the same seed and kind, and never one of training's.

    Raises:
        ValueError: an unknown kind.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind {kind!r}: known are {', '.join(KINDS)}")
    rng = random.Random(f"held-out {seed}")
    drawn = rng.choice(KINDS)
    kind = drawn if kind is None else kind
    while True:
        scenes = [draw_scene(rng)] if kind in ONE_PICTURE else draw_scenes(rng, kind, rng.randint(2, MAX_PICTURES))
        asked = ask(rng, kind, scenes)
        if asked is not None:
            return Question(kind, tuple(scenes), *asked)


def held_out(seed: int, count: int) -> list[Question]:
    """`count` questions of all kinds in turn."""
    return [draw_question(seed << 20 | i, KINDS[i % len(KINDS)]) for i in range(count)]


def draw_scenes(
    rng: random.Random, kind: str, count: int, sizes: Sequence[tuple[int, int]] | None = None
) -> list[Scene]:
    """`count` scenes that a question of that kind can be about. `sizes` (width, height) are drawn where not given."""
    pairs: list[tuple[int | None, int | None]] = [(None, None)] * count if sizes is None else list(sizes)
    kinds_of: list[list[tuple[str, str]] | None]
    if kind == "same":
        names = rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], count)
        for i in range(1, count):  # near misses: of one colour, or of one shape, but not the same
            near = rng.choice([(names[0][0], rng.choice(SHAPES)), (rng.choice(tuple(COLOURS)), names[0][1])])
            if rng.random() < 0.4 and near not in names:
                names[i] = near
        if rng.random() < 0.5:
            one, other = rng.sample(range(count), 2)
            names[one] = names[other]
        else:
            rng.shuffle(names)
        kinds_of = [[name] for name in names]
    else:
        kinds_of = [None] * count
    most = _MOST_THINGS[kind]
    return [
        draw_scene(rng, num_things=rng.randint(1, most), kinds=kinds, width=width, height=height)
        for kinds, (width, height) in zip(kinds_of, pairs, strict=True)
    ]


def ask(rng: random.Random, kind: str, scenes: Sequence[Scene]) -> Asked | None:
    """A question of that kind about the scenes; None where chance met one whose answer would not be clear."""
    return _ASK[kind](rng, scenes)


def listed(things: Sequence[Thing]) -> str:
    """`a red circle, a blue ring and an orange star`, from left to right."""
    names = [_a(thing.name) for thing in things]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _what(_rng: random.Random, scenes: Sequence[Scene]) -> Asked:
    return "What is in the picture?", listed(scenes[0].things)


def _count(rng: random.Random, scenes: Sequence[Scene]) -> Asked:
    things = scenes[0].things
    by = rng.choice(("shape", "colour", "all"))
    if by == "all":
        return "How many things are in the picture?", NUMBERS[len(things)]
    present = rng.random() < 0.85  # else any, and then often none
    if by == "shape":
        shape = rng.choice([thing.shape for thing in things]) if present else rng.choice(SHAPES)
        number = sum(thing.shape == shape for thing in things)
        return f"How many {_PLURALS[shape]} are in the picture?", NUMBERS[number]
    colour = rng.choice([thing.colour for thing in things]) if present else rng.choice(tuple(COLOURS))
    number = sum(thing.colour == colour for thing in things)
    return f"How many {colour} things are in the picture?", NUMBERS[number]


def _colour(rng: random.Random, scenes: Sequence[Scene]) -> Asked | None:
    thing = rng.choice(scenes[0].things)
    if sum(other.shape == thing.shape for other in scenes[0].things) > 1:
        return None
    return f"What colour is the {thing.shape}?", thing.colour


def _shape(rng: random.Random, scenes: Sequence[Scene]) -> Asked | None:
    thing = rng.choice(scenes[0].things)
    if sum(other.colour == thing.colour for other in scenes[0].things) > 1:
        return None
    return f"What shape is the {thing.colour} thing?", _a(thing.shape)


def _where(rng: random.Random, scenes: Sequence[Scene]) -> Asked | None:
    scene = scenes[0]
    things = scene.things
    thing = rng.choice(things)
    beside = rng.random() < 0.5
    if sum(other.name == thing.name for other in things) > 1:
        return None
    if len(things) == 1 or rng.random() < 0.25:
        off = thing.x / scene.width - 0.5 if beside else thing.y / scene.height - 0.5
        if abs(off) < _MARGIN / 2:
            return None
        if beside:
            return f"Is the {thing.name} in the left or right half?", "left" if off < 0 else "right"
        return f"Is the {thing.name} in the upper or lower half?", "upper" if off < 0 else "lower"
    other = rng.choice(things)
    if sum(third.name == other.name for third in things) > 1 or other is thing:
        return None
    off = (thing.x - other.x) / scene.width if beside else (thing.y - other.y) / scene.height
    if abs(off) < _MARGIN:
        return None
    if beside:
        return f"Is the {thing.name} left or right of the {other.name}?", "left" if off < 0 else "right"
    return f"Is the {thing.name} above or below the {other.name}?", "above" if off < 0 else "below"


def _which(rng: random.Random, scenes: Sequence[Scene]) -> Asked | None:
    number = rng.randrange(len(scenes))
    name = rng.choice(scenes[number].things).name
    if sum(any(thing.name == name for thing in scene.things) for scene in scenes) > 1:
        return None
    return f"Which picture shows {_a(name)}?", f"the {ORDINALS[number]}"


def _same(_rng: random.Random, scenes: Sequence[Scene]) -> Asked | None:
    if any(len(scene.things) > 1 for scene in scenes):
        return None
    names = [scene.things[0].name for scene in scenes]
    pairs = [(i, j) for j in range(len(names)) for i in range(j) if names[i] == names[j]]
    if len(pairs) > 1:
        return None
    verdict = f"yes, the {ORDINALS[pairs[0][0]]} and the {ORDINALS[pairs[0][1]]}" if pairs else "no"
    return "Do two pictures show the same?", f"{', '.join(_a(name) for name in names)}: {verdict}"


def _describe(rng: random.Random, scenes: Sequence[Scene]) -> Asked:
    number = rng.randrange(len(scenes))
    return f"Describe the {ORDINALS[number]} picture.", listed(scenes[number].things)


_ASK: dict[str, Callable[[random.Random, Sequence[Scene]], Asked | None]] = {
    "what": _what,
    "count": _count,
    "colour": _colour,
    "shape": _shape,
    "where": _where,
    "which": _which,
    "same": _same,
    "describe": _describe,
}
