"""Training batches: pictures, and many questions about them in one sequence.

A sequence is a shared beginning, chat header and pictures, and then branches. Each branch is a question with its
answer; it sees the beginning and itself, and its positions go on from the beginning's. So one look at a picture serves
many questions, and each is seen as it is when it is asked alone. All sequences of a batch share number and sizes of
pictures.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from demo.pictures import MAX_SIDE, MIN_SIDE, Scene, draw_scene, render
from demo.questions import KINDS, ONE_PICTURE, Asked, ask, draw_scenes
from demo.training.labels import IGNORED, Cells, Named, Repeats, WordLabels, Words, label_cells


@dataclass(frozen=True, slots=True)
class Looks:
    """Pictures of one size, and what each of their cells shows: lessons for the vision tower alone."""

    grid: Cells
    patches: torch.Tensor  # [num_pictures, num_patches, channels * patch * patch], float32
    colours: torch.Tensor  # [num_pictures, num_cells]; 0 is background
    shapes: torch.Tensor  # [num_pictures, num_cells]; 0 is background
    centres: torch.Tensor  # [num_pictures, num_cells], bool: a thing's centre is in it
    places: torch.Tensor  # [num_pictures, num_cells, 2]: x and y of its thing's centre, 0 to 1; NaN where there is none

    def to(self, device: torch.device) -> Looks:
        tensors = (self.patches, self.colours, self.shapes, self.centres, self.places)
        return Looks(self.grid, *(tensor.to(device, non_blocking=True) for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of `len(looks)` pictures each."""

    looks: list[Looks]  # the first pictures of all sequences, the second ones, …
    token_ids: torch.Tensor  # [batch, length]
    position_ids: torch.Tensor  # [3, batch, length]
    branches: torch.Tensor  # [batch, length]; 0 is the beginning, -1 padding
    visual_places: torch.Tensor  # [num_embeds]
    targets: torch.Tensor  # [batch, length]: the next token where it belongs to an answer, else IGNORED
    weights: torch.Tensor  # [batch, length]: of each target; the longer an answer, the less each of its tokens
    named: Named
    asked: tuple[Named, Named]  # the first and the second thing that the question names, at each token of the answer
    repeats: Repeats
    kinds: torch.Tensor  # [batch, branches]: index into KINDS

    def to(self, device: torch.device) -> Batch:
        return Batch(
            [looks.to(device) for looks in self.looks],
            self.token_ids.to(device),
            self.position_ids.to(device),
            self.branches.to(device),
            self.visual_places.to(device),
            self.targets.to(device),
            self.weights.to(device),
            self.named.to(device),
            (self.asked[0].to(device), self.asked[1].to(device)),
            self.repeats.to(device),
            self.kinds,
        )

    def mask(self) -> torch.Tensor:
        """Who attends to whom.  # [batch, 1, length, length], bool"""
        rows, columns = self.branches[:, :, None], self.branches[:, None, :]
        length = self.branches.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=rows.device).tril()
        return (((rows == columns) & earlier) | ((columns == 0) & (rows > 0))).unsqueeze(1)


def sides(cells: int, cell: int) -> tuple[int, int]:
    """The smallest and the largest side, in pixels, that the image processor makes so many cells of."""
    fitting = [side for side in range(MIN_SIDE, MAX_SIDE + 1) if round(side / cell) == cells]
    return fitting[0], fitting[-1]


class BatchMaker:
    """Draws batches. All chance comes from the seed of each call."""

    def __init__(self, tokenizer: Tokenizer, patch_size: int) -> None:
        self._tokenizer = tokenizer
        self._patch = patch_size
        self.cell = 2 * patch_size
        vocab = tokenizer.get_vocab()
        self._pad_id = vocab["<|endoftext|>"]
        self._image_id = vocab["<|image_pad|>"]
        self._end_id = vocab["<|im_end|>"]
        self._colon_id = vocab[":"]
        self._words = Words(vocab)
        self._known: dict[str, list[int]] = {}

    def looks(self, seed: str, count: int, max_side: int, most_things: int) -> Looks:
        """Single pictures for the tower alone."""
        rng = random.Random(f"training {seed}")
        grid = self._draw_grid(rng, max_side)
        width, height = self._size(rng, grid)
        scenes = [
            draw_scene(rng, num_things=rng.randint(1, most_things), width=width, height=height) for _ in range(count)
        ]
        return self._look(scenes, grid)

    def one_picture(
        self, seed: str, count: int, kinds: Sequence[str], max_side: int, most_things: int, least_things: int = 1
    ) -> Batch:
        """Sequences of one picture, with a question of each of `kinds`."""
        rng = random.Random(f"training {seed}")
        grid = self._draw_grid(rng, max_side)
        groups = []
        for _ in range(count):
            width, height = self._size(rng, grid)
            num_things = rng.randint(least_things, most_things)
            groups.append([draw_scene(rng, num_things=num_things, width=width, height=height)])
        return self._batch(rng, groups, [grid], [list(kinds)] * count)

    def several_pictures(
        self, seed: str, count: int, num_questions: int, max_side: int, num_pictures: int | None = None
    ) -> Batch:
        """Sequences of two to four pictures."""
        rng = random.Random(f"training {seed}")
        number = num_pictures or rng.randint(2, 4)
        grids = [self._draw_grid(rng, max_side) for _ in range(number)]
        groups, kinds = [], []
        for _ in range(count):
            kind = rng.choice(("which", "same", "describe"))
            groups.append(draw_scenes(rng, kind, number, [self._size(rng, grid) for grid in grids]))
            if kind == "same":  # all that there is to ask about such pictures is asked in one answer
                kinds.append(["same", "same", *rng.choices(("which", "describe"), k=num_questions - 2)])
            else:
                kinds.append(["which", "describe"] * (num_questions // 2))
        return self._batch(rng, groups, grids, kinds)

    def verdicts(self, seed: str, count: int) -> Batch:
        """Sequences without pictures: what several pictures show is given in words, and whether two show the same is to
        be learnt. So many of these cost little, and looking teaches only one at a time."""
        rng = random.Random(f"training {seed}")
        groups = [draw_scenes(rng, "same", rng.randint(2, 4)) for _ in range(count)]
        batch = self._batch(rng, groups, [], [["same"]] * count)
        listed = (batch.token_ids == self._colon_id).cumsum(1) == 0  # the verdict follows the only colon
        targets = batch.targets.masked_fill(listed, IGNORED)
        return dataclasses.replace(batch, targets=targets, weights=batch.weights * ~listed)

    def _draw_grid(self, rng: random.Random, max_side: int) -> Cells:
        """As held-out pictures have them: sides drawn evenly in pixels, 4 in 10 pictures square."""
        rows = round(rng.randint(MIN_SIDE, max_side) / self.cell)
        columns = rows if rng.random() < 0.4 else round(rng.randint(MIN_SIDE, max_side) / self.cell)
        return rows, columns

    def _size(self, rng: random.Random, grid: Cells) -> tuple[int, int]:
        """A width and a height that the image processor makes that grid of."""
        height, width = (rng.randint(*sides(cells, self.cell)) for cells in grid)
        return width, height

    def _batch(
        self, rng: random.Random, groups: list[list[Scene]], grids: list[Cells], kinds: list[list[str]]
    ) -> Batch:
        looks = [self._look([group[i] for group in groups], grid) for i, grid in enumerate(grids)]
        beginning, positions, visual_places = self._beginning(grids)
        next_position = int(positions.max()) + 1
        rows, branch_rows, target_rows, weight_rows, position_rows = [], [], [], [], []
        labels = WordLabels(self._words, groups)
        for row, (group, wanted) in enumerate(zip(groups, kinds, strict=True)):
            ids = list(beginning)
            branches = [0] * len(ids)
            targets = [IGNORED] * len(ids)
            weights = [0.0] * len(ids)
            text_positions: list[int] = []
            for number, kind in enumerate(wanted, start=1):
                prompt, answer = self._ask(rng, kind, group)
                question = self._encode(f"{prompt}<|im_end|>\n<|im_start|>assistant\n")
                reply = [*self._encode(answer), self._end_id]
                said = question + reply[:-1]  # what would follow the last token is not asked for
                labels.add(row, len(ids), question, said, is_list=":" in answer)
                ids += said
                num = len(question) + len(reply) - 1
                branches += [number] * num
                targets += [IGNORED] * (len(question) - 1) + reply
                weights += [0.0] * (len(question) - 1) + [len(reply) ** -0.5] * len(reply)
                text_positions += range(next_position, next_position + num)
            rows.append(ids)
            branch_rows.append(branches)
            target_rows.append(targets)
            weight_rows.append(weights)
            position_rows.append(text_positions)
        length = -(-max(map(len, rows)) // 16) * 16  # few different shapes: kernels are compiled for each
        text = torch.zeros(len(rows), length - len(beginning), dtype=torch.long)
        for i, places in enumerate(position_rows):
            text[i, : len(places)] = torch.tensor(places)
        position_ids = torch.cat([positions[:, None].expand(3, len(rows), -1), text[None].expand(3, -1, -1)], dim=-1)
        kind_ids = torch.tensor([[KINDS.index(kind) for kind in wanted] for wanted in kinds])
        return Batch(
            looks,
            _padded(rows, length, self._pad_id),
            position_ids,
            _padded(branch_rows, length, -1),
            visual_places,
            _padded(target_rows, length, IGNORED),
            _padded(weight_rows, length, 0),
            labels.named(),
            labels.asked(),
            labels.repeats(),
            kind_ids,
        )

    def _ask(self, rng: random.Random, kind: str, group: Sequence[Scene]) -> Asked:
        """A question of that kind, or of another where these scenes allow none."""
        kinds = ONE_PICTURE if kind in ONE_PICTURE else ("which", "describe")
        for _ in range(4):
            asked = ask(rng, kind, group)
            if asked is not None:
                return asked
        while True:
            asked = ask(rng, rng.choice(kinds), group)
            if asked is not None:
                return asked

    def _encode(self, text: str) -> list[int]:
        known = self._known.get(text)
        if known is None:
            known = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._known) < 100_000:
                self._known[text] = known
        return known

    def _beginning(self, grids: Sequence[Cells]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Token ids, positions [3, length], and the places of pictures' embeddings, as transformers counts them."""
        ids = self._encode("<|im_start|>user\n")[:]
        positions = [torch.arange(len(ids)).expand(3, -1)]
        places: list[int] = []
        following = len(ids)
        for number, (rows, columns) in enumerate(grids, start=1):
            before = self._encode(f"Picture {number}: <|vision_start|>")
            positions.append(torch.arange(following, following + len(before)).expand(3, -1))
            following += len(before)
            ids += before
            places += range(len(ids), len(ids) + rows * columns)
            ids += [self._image_id] * (rows * columns)
            y = torch.arange(rows).repeat_interleave(columns)
            x = torch.arange(columns).repeat(rows)
            positions.append(following + torch.stack([torch.zeros_like(x), y, x]))
            following += max(rows, columns)
            after = self._encode("<|vision_end|>")
            positions.append(torch.arange(following, following + len(after)).expand(3, -1))
            following += len(after)
            ids += after
        return ids, torch.cat(positions, dim=1), torch.tensor(places, dtype=torch.long)

    def _look(self, scenes: Sequence[Scene], grid: Cells) -> Looks:
        rows, columns = grid
        pixels = np.stack([self._pixels(scene, grid) for scene in scenes])
        labels = [label_cells(scene, grid) for scene in scenes]
        colours, shapes, centres, places = (np.stack(parts) for parts in zip(*labels, strict=True))
        p = self._patch
        # Patches in the order of the embeddings that they merge into, as the image processor lays them out.
        patches = pixels.reshape(len(scenes), rows, 2, p, columns, 2, p, 3).transpose(0, 1, 4, 2, 5, 7, 3, 6)
        flat = torch.from_numpy(np.ascontiguousarray(patches)).view(len(scenes), rows * columns * 4, 3 * p * p)
        return Looks(
            (2 * rows, 2 * columns),
            flat.float().div_(127.5).sub_(1.0),
            torch.from_numpy(colours),
            torch.from_numpy(shapes),
            torch.from_numpy(centres),
            torch.from_numpy(places),
        )

    def _pixels(self, scene: Scene, grid: Cells) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        image = render(scene)
        size = (grid[1] * self.cell, grid[0] * self.cell)
        if image.size != size:
            image = image.resize(size, Image.Resampling.BICUBIC)
        return np.asarray(image)


def _padded(rows: Sequence[Sequence[float]], length: int, value: int) -> torch.Tensor:
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])
