"""How much work a request is, told before any stage has seen it: no tokenizer, no pixels.

Images are predicted exactly, with the rule that an encoder publishes; before one did, from their area. A text is taken
to have a token for every four bytes. Chats differ from that by some tens of percent, which is nothing to a choice
between workers or to a limit on all that is under way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from blake3 import blake3

from core.convert import vision_rule_from_proto
from core.errors import InvalidRequestError
from core.types import Stage
from core.vision_grid import VisionGrid
from protos import common_pb2, prefill_pb2
from router.door import Image, Job
from router.work import PrefixBlock, Work

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 4
#: Text of a prompt that is remembered as one; a difference further in makes the whole of it new.
_BLOCK_BYTES = 256
_BLOCK_TOKEN_IDS = 64
#: Fewer are not remembered by themselves: a prefix cache keeps whole blocks of its own.
_MIN_BLOCK_TOKENS = 16
#: What is longer is remembered up to here: a prompt may have megabytes.
_MAX_BLOCKS = 512
_DIGEST_BYTES = 16
#: Area that makes one embedding, in pixels, before an encoder said more.
_PIXELS_PER_EMBED = 32 * 32
#: Tokens of an answer whose client set no limit.
_USUAL_ANSWER = 256


class Predictor:
    """Event loop only."""

    def __init__(self) -> None:
        self._grid: VisionGrid | None = None

    def learn(self, rule: common_pb2.VisionRule) -> None:
        """Predict with this from now on. A rule that makes no sense is logged and left."""
        try:
            self._grid = vision_rule_from_proto(rule)
        except InvalidRequestError as error:
            logger.error("an encoder's rule of prediction is left out: %s", error)

    def num_embeds(self, image: Image) -> int:
        """At least 1."""
        if self._grid is not None:
            try:
                return self._grid.predict(image.width, image.height)[1]
            except InvalidRequestError:
                return 1  # an encoder will refuse it, by name
        return max(1, image.width * image.height // _PIXELS_PER_EMBED)

    def request_tokens(self, job: Job) -> int:
        """All tokens of a request: its texts, its images, its answer."""
        num_bytes = job.chat.ByteSize() if job.chat is not None else 0
        num_ids = len(job.tokens.token_ids) if job.tokens is not None else 0
        images = sum(self.num_embeds(image) for image in job.images)
        return num_bytes // _BYTES_PER_TOKEN + num_ids + images + (job.sampling.max_tokens or _USUAL_ANSWER)

    def prefill_work(
        self, request: prefill_pb2.PrefillRequest, original: prefill_pb2.PrefillRequest | None = None
    ) -> Work:
        """See `Fleet.prefill_work`. Its features say what they will take, so nothing is predicted of images."""
        if request.WhichOneof("prompt") == "expanded":
            expanded = request.expanded
            cost = len(expanded.prompt_token_ids) + len(expanded.output_token_ids)
            prefix = self.prefill_work(original).prefix if original is not None else ()
        else:
            chain = _Chain(request.tenant)
            if request.WhichOneof("prompt") == "tokens":
                # Where in the prompt the images stand is known to prefill only: all of them go before the text.
                for feature in request.features:
                    chain.add_image(feature)
                chain.add_token_ids(request.tokens.token_ids)
            else:
                features = iter(request.features)
                for message in request.chat.messages:
                    chain.add_text(message.role)
                    for part in message.content:
                        if part.WhichOneof("part") == "image":
                            chain.add_image(next(features))
                        else:
                            chain.add_text(part.text.text)
            cost, prefix = chain.num_tokens, tuple(chain.blocks)
        return Work(stage=Stage.PREFILL, cost=max(1, cost), prefix=prefix)


class _Chain:
    """A prompt cut into blocks, each with a digest of all up to its end."""

    def __init__(self, tenant: str) -> None:
        self._hash = blake3(b"prefix\0" + tenant.encode())
        self.blocks: list[PrefixBlock] = []
        self.num_tokens = 0
        self._pending = 0  # tokens since the last block

    def add_text(self, text: str) -> None:
        data = text.encode()
        # The end of a part ends a block, so that a conversation's next turn meets all of the last one.
        pieces = (data[at : at + _BLOCK_BYTES] for at in range(0, len(data), _BLOCK_BYTES))
        self._add(((b"t", piece, len(piece) // _BYTES_PER_TOKEN) for piece in pieces), len(data))

    def add_token_ids(self, token_ids: Iterable[int]) -> None:
        ids = list(token_ids)
        pieces = (ids[at : at + _BLOCK_TOKEN_IDS] for at in range(0, len(ids), _BLOCK_TOKEN_IDS))
        self._add(
            ((b"i", b"".join(i.to_bytes(4, "big") for i in piece), len(piece)) for piece in pieces),
            len(ids) * _BYTES_PER_TOKEN,
        )

    def add_image(self, feature: common_pb2.Feature) -> None:
        self._add([(b"m", feature.key.encode(), feature.num_embeds)], feature.num_embeds * _BYTES_PER_TOKEN)

    def _add(self, pieces: Iterable[tuple[bytes, bytes, int]], num_bytes: int) -> None:
        self.num_tokens += num_bytes // _BYTES_PER_TOKEN
        for kind, piece, num_tokens in pieces:
            if len(self.blocks) >= _MAX_BLOCKS:
                return
            # With its length: else two parts would be the same as one that is both of them.
            self._hash.update(kind + len(piece).to_bytes(4, "big") + piece)
            self._pending += num_tokens
            if self._pending >= _MIN_BLOCK_TOKENS:
                self.blocks.append(PrefixBlock(self._hash.digest(length=_DIGEST_BYTES), self._pending))
                self._pending = 0
