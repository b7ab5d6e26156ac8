"""What is learnt from a batch: losses, and how much was right.

Besides the answers there are lessons for the vision tower: small heads, thrown away after training, read from each
embedding which thing it belongs to, and where that is. Without them shapes take hours. Another one reads from each
embedding, after the language model's first layer, the number of its picture. From each name of a thing, after the
second layer, all that is to know of the thing is read, and once more, after the third, from each token of an answer
about it: so names find their things, and answers the names. In lists of names it is read which one repeats which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from demo.pictures import COLOURS, SHAPES
from demo.questions import KINDS, MAX_PICTURES
from demo.training.batches import Batch, Looks
from demo.training.forward import BatchedModel
from demo.training.labels import IGNORED, Named, Repeats

#: Right and asked, by lesson: kinds of questions, `cells` for the tower's, `numbers` for the pictures',
#: `things` for those named, `asked` for those that a question is about,
#: `verdicts` for pictures given in words.
Tally = dict[str, tuple[int, int]]


class CellHeads(nn.Module):
    """Colour, shape, "a centre is here", and x and y of the centre, from one embedding."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.splits = [len(COLOURS) + 1, len(SHAPES) + 1, 1, 2]
        self.linear = nn.Linear(hidden, sum(self.splits))

    def forward(self, embeds: torch.Tensor, looks: Looks) -> tuple[torch.Tensor, tuple[int, int]]:
        """Loss, and (right, labelled) of the cells that belong to things: right is colour and shape."""
        colour, shape, centre, place = self.linear(embeds).float().split(self.splits, dim=-1)
        loss = F.cross_entropy(colour.flatten(0, 1), looks.colours.flatten(), ignore_index=IGNORED)
        loss = loss + F.cross_entropy(shape.flatten(0, 1), looks.shapes.flatten(), ignore_index=IGNORED)
        loss = loss + 2 * F.binary_cross_entropy_with_logits(centre.squeeze(-1), looks.centres.float())
        own = looks.colours > 0
        loss = loss + 4 * F.smooth_l1_loss(place[own], looks.places[own], beta=0.1)
        right = (colour[own].argmax(-1) == looks.colours[own]) & (shape[own].argmax(-1) == looks.shapes[own])
        return loss, (int(right.sum()), int(own.sum()))


class ThingHeads(nn.Module):
    """Colour, shape, picture, x and y of a thing, from the last word of its name."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.splits = [len(COLOURS), len(SHAPES), MAX_PICTURES, 2]
        self.linear = nn.Linear(hidden, sum(self.splits))

    def forward(self, states: torch.Tensor, named: Named) -> tuple[torch.Tensor, tuple[int, int]]:
        """Loss, and (right, named): right are colour, shape, picture, and the place within a tenth of the sides.

        # states: [batch, length, hidden]
        """
        if not len(named.tokens):
            # A gradient of zero all the same: all workers must have gradients of the same parameters.
            return (self.linear.weight.sum() + self.linear.bias.sum()) * 0.0, (0, 0)
        # States between layers are of any size; a head that took them as they are would shake the model at first.
        own = F.rms_norm(states[named.tokens[:, 0], named.tokens[:, 1]].float(), states.shape[-1:])
        colour, shape, picture, place = self.linear(own).float().split(self.splits, dim=-1)
        loss = F.cross_entropy(colour, named.colours) + F.cross_entropy(shape, named.shapes)
        loss = loss + F.cross_entropy(picture, named.pictures) + 4 * F.smooth_l1_loss(place, named.places, beta=0.1)
        right = (colour.argmax(-1) == named.colours) & (shape.argmax(-1) == named.shapes)
        right &= (picture.argmax(-1) == named.pictures) & ((place - named.places).abs() < 0.1).all(-1)
        return loss, (int(right.sum()), len(right))


class RepeatHeads(nn.Module):
    """The number of a name in a list, and the number of the same name before it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 2 * MAX_PICTURES)

    def forward(self, states: torch.Tensor, repeats: Repeats) -> torch.Tensor:
        """Loss.

        # states: [batch, length, hidden]
        """
        if not len(repeats.tokens):
            return (self.linear.weight.sum() + self.linear.bias.sum()) * 0.0
        own = F.rms_norm(states[repeats.tokens[:, 0], repeats.tokens[:, 1]].float(), states.shape[-1:])
        number, earlier = self.linear(own).float().chunk(2, dim=-1)
        return F.cross_entropy(number, repeats.numbers) + 2 * F.cross_entropy(earlier, repeats.earlier)


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one batch."""

    answers: torch.Tensor
    cells: torch.Tensor
    numbers: torch.Tensor
    things: torch.Tensor
    asked: torch.Tensor
    repeats: torch.Tensor


class Lessons(nn.Module):
    """A model with the heads that help it to learn."""

    def __init__(self, model: BatchedModel, hidden: int) -> None:
        super().__init__()
        self.batched = model
        self.heads = CellHeads(hidden)
        self.number_heads = nn.Linear(hidden, MAX_PICTURES)
        self.thing_heads = ThingHeads(hidden)
        self.asked_heads = nn.ModuleList([ThingHeads(hidden), ThingHeads(hidden)])
        self.repeat_heads = RepeatHeads(hidden)

    def look(self, looks: Looks) -> tuple[torch.Tensor, Tally]:
        """The tower's lesson alone."""
        embeds, _ = self.batched.see(looks.patches, looks.grid)
        loss, tally = self.heads(embeds, looks)
        return loss, {"cells": tally}

    def judge(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Tally]:
        """Losses of verdicts about pictures that are given in words and of repeated names, and how many verdicts are
        right."""
        states = self.batched.read(batch.token_ids, batch.position_ids, batch.mask(), batch.visual_places, None)
        loss, tally = self._judge_answers(states[-1], batch)
        return loss, self.repeat_heads(states[2], batch.repeats), {"verdicts": tally["same"]}

    def answer(self, batch: Batch) -> tuple[Losses, Tally]:
        """The losses, and which answers were right from the first token to the last.

        Greedy decoding would have given the same: each token is judged after the right ones before it.
        """
        seen = [self.batched.see(looks.patches, looks.grid) for looks in batch.looks]
        cells = [self.heads(embeds, looks) for (embeds, _), looks in zip(seen, batch.looks, strict=True)]
        embeds = torch.cat([embeds for embeds, _ in seen], dim=1)
        levels = [torch.cat(level, dim=1) for level in zip(*(levels for _, levels in seen), strict=True)]
        states = self.batched.read(
            batch.token_ids, batch.position_ids, batch.mask(), batch.visual_places, (embeds, levels)
        )
        loss, tally = self._judge_answers(states[-1], batch)
        numbers = torch.cat([torch.full(e.shape[:2], i, device=e.device) for i, (e, _) in enumerate(seen)], dim=1)
        told = self.number_heads(states[0][:, batch.visual_places]).float()
        tally["numbers"] = (int((told.argmax(-1) == numbers).sum()), numbers.numel())
        tally["cells"] = (sum(right for _, (right, _) in cells), sum(count for _, (_, count) in cells))
        cell_loss = torch.stack([loss for loss, _ in cells]).mean()
        thing_loss, tally["things"] = self.thing_heads(states[1], batch.named)
        recalled = [heads(states[2], named) for heads, named in zip(self.asked_heads, batch.asked, strict=True)]
        tally["asked"] = (sum(right for _, (right, _) in recalled), sum(count for _, (_, count) in recalled))
        number_loss = F.cross_entropy(told.flatten(0, 1), numbers.flatten())
        repeat_loss = self.repeat_heads(states[2], batch.repeats)
        asked_loss = recalled[0][0] + recalled[1][0]
        return Losses(loss, cell_loss, number_loss, thing_loss, asked_loss, repeat_loss), tally

    def _judge_answers(self, states: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Tally]:
        """Loss and right answers by kind, from the last hidden states."""
        asked = batch.targets != IGNORED
        logits = self.batched.model.lm_head(states[asked]).float()
        targets = batch.targets[asked]
        weights = batch.weights[asked]
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
        wrong = torch.zeros(batch.kinds.shape[0], batch.kinds.shape[1] + 1, dtype=torch.long)
        rows = torch.arange(batch.targets.shape[0])[:, None].expand_as(batch.targets)[asked]
        wrong.index_put_((rows.cpu(), batch.branches[asked].cpu()), (logits.argmax(-1) != targets).long().cpu(), True)
        right = wrong[:, 1:] == 0
        tally: Tally = {}
        for number, kind in enumerate(KINDS):
            of_kind = batch.kinds.cpu() == number
            if of_kind.any():
                tally[kind] = (int(right[of_kind].sum()), int(of_kind.sum()))
        return loss, tally
