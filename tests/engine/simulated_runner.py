"""A runner without a model that notices every mistake of a scheduler: it keeps track of what each slot of the KV cache
and each row of the encoder buffer holds, and what it "generates" depends on all that a request attends to.

A slot holds the fingerprint of the whole prefix up to its token, images included. So a block that is shared wrongly,
overwritten, reused too early or never computed shows as a wrong fingerprint, and a token that is lost, repeated or made
from the wrong state shows in the answer, which `expected_answer` knows without any scheduler.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.types import PlacedFeature
from engine.scheduler_output import SchedulerOutput

VOCABULARY = 40


def _next(fingerprint: int, token: int, image: str) -> int:
    return zlib.crc32(f"{fingerprint} {token} {image}".encode())


def _image_at(features: Sequence[PlacedFeature], index: int) -> str:
    for placed in features:
        if placed.offset <= index < placed.end:
            return f"{placed.feature.key} {index - placed.offset}"
    return ""


def fingerprints(tokens: Sequence[int], features: Sequence[PlacedFeature], salt: str = "") -> list[int]:
    """Of each prefix of `tokens`."""
    made, last = [], zlib.crc32(salt.encode())
    for i, token in enumerate(tokens):
        last = _next(last, token, _image_at(features, i))
        made.append(last)
    return made


def token_after(fingerprint: int) -> int:
    return fingerprint % VOCABULARY


def expected_answer(
    prompt: Sequence[int], features: Sequence[PlacedFeature], max_tokens: int, stop_ids: Sequence[int], salt: str = ""
) -> list[int]:
    tokens, answer = list(prompt), []
    while len(answer) < max_tokens:
        token = token_after(fingerprints(tokens, features, salt)[-1])
        tokens.append(token)
        answer.append(token)
        if token in stop_ids:
            break
    return answer


@dataclass
class _Row:
    """The runner's own copy of a request."""

    tokens: list[int]
    features: list[PlacedFeature]
    blocks: list[int]
    salt: str
    num_prompt: int = field(default=0)


class SimulatedRunner:
    """Executes steps in order. `salts` says by request id what no other tenant may share."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        self._block_size = block_size
        self._slots: list[int | None] = [None] * (num_blocks * block_size)
        self.buffer: list[str | None] = [None] * num_rows
        self._rows: dict[str, _Row] = {}
        self.salts: dict[str, str] = {}

    def fill_rows(self, key: str, start: int, num_rows: int) -> None:
        """An item lies in the buffer now."""
        self.buffer[start : start + num_rows] = [f"{key} {i}" for i in range(num_rows)]

    def fill_blocks(
        self, tokens: Sequence[int], features: Sequence[PlacedFeature], blocks: Sequence[int], salt: str
    ) -> None:
        """A pull brought these tokens' keys and values."""
        for i, fingerprint in enumerate(fingerprints(tokens, features, salt)):
            self._slots[blocks[i // self._block_size] * self._block_size + i % self._block_size] = fingerprint

    def execute(self, out: SchedulerOutput) -> dict[str, int]:
        """Run one step; the tokens that it samples."""
        for request_id in out.finished_request_ids:
            self._rows.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in out.new_requests:
            assert new.request_id not in self._rows, "the runner was told twice"
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            salt = self.salts.get(new.request_id, "")
            self._rows[new.request_id] = _Row(tokens, new.features, list(new.block_ids), salt)
            computed[new.request_id] = new.num_computed_tokens
        cached = out.cached_requests
        for request_id, blocks, num in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._rows[request_id].blocks += blocks
            computed[request_id] = num
        uses: dict[tuple[str, int], int] = {}
        for use in out.item_uses:
            uses.update({(use.request_id, use.first_token + i): use.first_row + i for i in range(use.num_tokens)})
        sampled = {}
        for request_id, num_tokens in out.num_scheduled_tokens.items():
            row = self._rows[request_id]
            begin, end = computed[request_id], computed[request_id] + num_tokens
            assert end <= len(row.tokens), "scheduled beyond what is known"
            known = fingerprints(row.tokens, row.features, row.salt)
            for i in range(begin):
                assert self._slots[self._slot(row, i)] == known[i], f"{request_id}: wrong keys and values at {i}"
            for i in range(begin, end):
                image = _image_at(row.features, i)
                if image:
                    assert self.buffer[uses[request_id, i]] == image, f"{request_id}: wrong embedding at {i}"
                self._slots[self._slot(row, i)] = known[i]
            if end == len(row.tokens):
                sampled[request_id] = token_after(known[-1])
                row.tokens.append(sampled[request_id])
        return sampled

    def _slot(self, row: _Row, index: int) -> int:
        return row.blocks[index // self._block_size] * self._block_size + index % self._block_size
