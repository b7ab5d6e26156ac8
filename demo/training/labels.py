"""What is known of cells and words besides the answers: labels for the lessons that are thrown away after training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from demo.pictures import COLOURS, SHAPES, Scene, Thing

#: Of a label: not to be learnt.
IGNORED = -100
#: A cell belongs to a thing whose box covers this much of it; cells that boxes only graze are not labelled.
_COVERED = 0.35

_COLOUR_IDS = {colour: number for number, colour in enumerate(COLOURS, start=1)}
_SHAPE_IDS = {shape: number for number, shape in enumerate(SHAPES, start=1)}

#: Rows and columns in embeddings ("cells").
Cells = tuple[int, int]
#: Sequence, place of a token in it, the thing that it is about, and the number of that one's picture.
NamedAt = tuple[int, int, Thing, int]


@dataclass(frozen=True, slots=True)
class Named:
    """The things that words of questions and answers name, where it is one thing alone."""

    tokens: torch.Tensor  # [num_named, 2]: sequence and place of the last token of the name
    colours: torch.Tensor  # [num_named], from 0
    shapes: torch.Tensor  # [num_named], from 0
    pictures: torch.Tensor  # [num_named], from 0
    places: torch.Tensor  # [num_named, 2]: x and y of its centre, 0 to 1

    def to(self, device: torch.device) -> Named:
        tensors = (self.tokens, self.colours, self.shapes, self.pictures, self.places)
        return Named(*(tensor.to(device) for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Repeats:
    """The names in lists of what several pictures show, one of each."""

    tokens: torch.Tensor  # [num_names, 2]: sequence and place of the last token of the name
    numbers: torch.Tensor  # [num_names], from 0: its place in the list
    earlier: torch.Tensor  # [num_names]: the first place, from 1, at which the same name stands before it; 0 for none

    def to(self, device: torch.device) -> Repeats:
        return Repeats(self.tokens.to(device), self.numbers.to(device), self.earlier.to(device))


class Words:
    """The tokens that name things."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        self.colours = {vocab[f"\u0120{colour}"]: colour for colour in COLOURS}
        self.shapes = {vocab[f"\u0120{shape}"]: shape for shape in SHAPES}
        self.thing = vocab["\u0120thing"]


class WordLabels:
    """Collects what the names in a batch's sequences mean. `groups` are the scenes of each sequence."""

    def __init__(self, words: Words, groups: Sequence[Sequence[Scene]]) -> None:
        self._words = words
        self._groups = groups
        self._named: list[NamedAt] = []
        self._asked: tuple[list[NamedAt], list[NamedAt]] = ([], [])
        self._repeats: list[tuple[int, int, int, int]] = []

    def add(self, row: int, start: int, question: Sequence[int], said: Sequence[int], *, is_list: bool) -> None:
        """One branch.

        Args:
            row: number of its sequence.
            start: place of its first token there.
            question: its first tokens.
            said: all of its tokens.
            is_list: whether the answer lists one thing of each picture.
        """
        things = list(self._names(said, self._groups[row]))
        self._named += [(row, start + place, *thing) for place, thing in things]
        in_question = [thing for place, thing in things if place < len(question)]
        for meant, thing in zip(self._asked, in_question, strict=False):
            meant += [(row, start + place, *thing) for place in range(len(question) - 1, len(said))]
        if is_list:
            self._repeats += [(row, start + place, *pair) for place, pair in self._listed(said, self._groups[row])]

    def named(self) -> Named:
        """At the last token of each name of one thing alone."""
        return self._tensors(self._named)

    def asked(self) -> tuple[Named, Named]:
        """At each token of an answer, the first and the second thing that the question named."""
        return self._tensors(self._asked[0]), self._tensors(self._asked[1])

    def repeats(self) -> Repeats:
        columns = torch.tensor(self._repeats, dtype=torch.long).view(-1, 4)
        return Repeats(columns[:, :2], columns[:, 2], columns[:, 3])

    def _names(self, ids: Sequence[int], group: Sequence[Scene]) -> Iterator[tuple[int, tuple[Thing, int]]]:
        """Where the words name one thing alone, which, and in which picture."""
        for place, (before, word) in enumerate(itertools.pairwise(ids), start=1):
            shape, colour = self._words.shapes.get(word), self._words.colours.get(before)
            if shape is None and (colour is None or word != self._words.thing):
                continue
            meant = [
                (thing, number)
                for number, scene in enumerate(group)
                for thing in scene.things
                if shape in (None, thing.shape) and colour in (None, thing.colour)
            ]
            if len(meant) == 1:
                yield place, meant[0]

    def _listed(self, ids: Sequence[int], group: Sequence[Scene]) -> Iterator[tuple[int, tuple[int, int]]]:
        """Where a name of the list ends, its number, and where the same name stood before."""
        names = [scene.things[0].name for scene in group]
        ends = [place for place, word in enumerate(ids) if word in self._words.shapes]
        for number, place in enumerate(ends):
            yield place, (number, (names[:number].index(names[number]) + 1) if names[number] in names[:number] else 0)

    def _tensors(self, named: Sequence[NamedAt]) -> Named:
        scenes = [self._groups[row][number] for row, _, _, number in named]
        places = [(at[2].x / scene.width, at[2].y / scene.height) for at, scene in zip(named, scenes, strict=True)]
        return Named(
            torch.tensor([(row, place) for row, place, _, _ in named], dtype=torch.long).view(-1, 2),
            torch.tensor([_COLOUR_IDS[thing.colour] - 1 for _, _, thing, _ in named], dtype=torch.long),
            torch.tensor([_SHAPE_IDS[thing.shape] - 1 for _, _, thing, _ in named], dtype=torch.long),
            torch.tensor([number for _, _, _, number in named], dtype=torch.long),
            torch.tensor(places).view(-1, 2),
        )


def label_cells(scene: Scene, grid: Cells) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Colours, shapes, centres and places of a scene's cells, row by row."""
    rows, columns = grid
    colours, shapes = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.int64)
    centres = np.zeros((rows, columns), np.bool_)
    places = np.full((rows, columns, 2), np.nan, np.float32)
    for thing in scene.things:
        left, right = (edge / scene.width * columns for edge in (thing.left, thing.left + thing.size))
        top, bottom = (edge / scene.height * rows for edge in (thing.top, thing.top + thing.size))
        across = np.clip(np.minimum(right, np.arange(columns) + 1) - np.maximum(left, np.arange(columns)), 0, 1)
        down = np.clip(np.minimum(bottom, np.arange(rows) + 1) - np.maximum(top, np.arange(rows)), 0, 1)
        cover = down[:, None] * across[None, :]
        x, y = thing.x / scene.width, thing.y / scene.height
        centre = (min(rows - 1, int(y * rows)), min(columns - 1, int(x * columns)))
        grazed = (cover > 0) & (cover < _COVERED) & (colours == 0)
        colours[grazed] = shapes[grazed] = IGNORED
        own = cover >= _COVERED
        own[centre] = True
        colours[own], shapes[own] = _COLOUR_IDS[thing.colour], _SHAPE_IDS[thing.shape]
        places[own] = (x, y)
        centres[centre] = True
    return colours.ravel(), shapes.ravel(), centres.ravel(), places.reshape(-1, 2)
