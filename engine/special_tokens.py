"""Keeps special tokens out of the words of clients: in a chat prompt they stand only where the template put them.

Words that spell one ("<|im_end|>", "<|image_pad|>") stay words:

1. In each text, stretches that spell a protected token, and ends that could become one together with what the template
   or another text puts beside them, are put between two marks: characters of a private-use plane that occur nowhere in
   the messages or the template. Other texts reach the template untouched, so it sees what it would under transformers.
2. The rendered text without its marks is cut at the protected tokens that lie outside marked stretches.
3. What lies between is tokenized by a second tokenizer that knows no protected tokens, and, where it is not the
   beginning, by a third that puts no space before it.

Without any mark, which is nearly always, one call of the ordinary tokenizer does all of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from core.errors import InvalidRequestError

_INSEPARABLE = "messages: a text spells a special token in a way that the tokenizer cannot keep apart"
_CUT_THROUGH = "messages: the chat template cut through a text that spells a special token"


def tokenize(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, nothing added. Unlike `Tokenizer.encode` it lets other threads run meanwhile."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class SpecialTokenGuard:
    """Keeps protected tokens, which are the special ones and the placeholder, out of the words of clients.

    Added tokens that are not special (Qwen's "<tool_call>") are ordinary vocabulary, as in transformers.
    """

    def __init__(
        self, tokenizer: Tokenizer, plain: Tokenizer, plain_inside: Tokenizer, image_token_id: int, template: str
    ) -> None:
        self._tokenizer = tokenizer
        self._plain = plain
        self._plain_inside = plain_inside
        self._template_characters = frozenset(template)
        added = tokenizer.get_added_tokens_decoder()
        tokens = {number: token for number, token in added.items() if token.special or number == image_token_id}
        self._id_of = {token.content: number for number, token in tokens.items()}
        self._protected_ids = frozenset(tokens)
        # The longest first: where one begins with another, the tokenizer takes the longer.
        ordered = sorted(tokens.values(), key=lambda token: -len(token.content))
        spelled = [re.escape(token.content) for token in ordered]
        self._spelled = re.compile("|".join(spelled) or "(?!)")
        # Some tokens swallow the white space beside them.
        around = [
            (r"\s*" if token.lstrip else "") + f"(?P<t{place}>{spelled[place]})" + (r"\s*" if token.rstrip else "")
            for place, token in enumerate(ordered)
        ]
        self._cut = re.compile("|".join(around) or "(?!)")
        contents = list(self._id_of)
        self._beginnings = tuple({text[:end] for text in contents for end in range(1, len(text))})
        self._endings = tuple({text[start:] for text in contents for start in range(1, len(text))})

    def mark(self, texts: Sequence[str]) -> tuple[list[str], str]:
        """The texts with marks put in, and the two characters used as marks; "" where no text needs one."""
        stretches = [self._stretches(text) for text in texts]
        if not any(stretches):
            return list(texts), ""
        seen = self._template_characters.union(*texts)
        free = (chr(number) for number in range(0xF0000, 0x10FFFE) if chr(number) not in seen)
        try:
            opening, closing = next(free), next(free)
        except StopIteration:
            raise InvalidRequestError(
                "messages: they hold every private-use character; at least 2 must be free"
            ) from None
        marked = []
        for text, spans in zip(texts, stretches, strict=True):
            pieces, end = [], 0
            for start, stop in spans:
                pieces += [text[end:start], opening, text[start:stop], closing]
                end = stop
            marked.append("".join([*pieces, text[end:]]))
        return marked, opening + closing

    def encode(self, rendered: str, marks: str) -> list[int]:
        """Token ids of a rendered prompt whose texts went through `mark`."""
        if not marks:
            ids = tokenize(self._tokenizer, rendered)
            # Normalization may make a special token of what spelled none; then there are more than the template wrote.
            if sum(map(self._protected_ids.__contains__, ids)) != sum(1 for _ in self._cut.finditer(rendered)):
                raise InvalidRequestError(_INSEPARABLE)
            return ids
        text, masked = self._unmark(rendered, marks)
        ids = []
        end = 0
        for cut in self._cut.finditer(masked):
            ids += self._encode_plain(text[end : cut.start()], first=end == 0)
            ids.append(self._id_of[cut[str(cut.lastgroup)]])
            end = cut.end()
        return ids + self._encode_plain(text[end:], first=end == 0)

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        plain = self._plain if first else self._plain_inside
        ids = tokenize(plain, text) if text else []
        if not self._protected_ids.isdisjoint(ids):
            # No byte-level vocabulary does this; if another kind does, the request must not pass.
            raise InvalidRequestError(_INSEPARABLE)
        return ids

    def _stretches(self, text: str) -> list[tuple[int, int]]:
        """Where protected tokens stand in a text, or may come to stand once it has neighbours. Ordered, disjoint."""
        spans = [cut.span() for cut in self._spelled.finditer(text)]
        # Templates may trim a text, so its ends are those of the words in it.
        left, right = len(text) - len(text.lstrip()), len(text.rstrip())
        core = text[left:right]
        head = max((len(ending) for ending in self._endings if core.startswith(ending)), default=0)
        tail = max((len(beginning) for beginning in self._beginnings if core.endswith(beginning)), default=0)
        if core and any(core in token for token in self._id_of):
            spans.append((left, right))
        if head:
            spans.append((left, left + head))
        if tail:
            spans.append((right - tail, right))
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return merged

    @staticmethod
    def _unmark(rendered: str, marks: str) -> tuple[str, str]:
        """The rendered text without marks, and the same with a NUL for each character that was between marks."""
        pieces = re.split(f"([{marks}])", rendered)
        text, masked = [], []
        inside = False
        for piece in pieces:
            if piece in (marks[0], marks[1]) and piece:
                if inside is (piece == marks[0]):
                    raise InvalidRequestError(_CUT_THROUGH)
                inside = not inside
                continue
            text.append(piece)
            masked.append("\0" * len(piece) if inside else piece)
        if inside:
            raise InvalidRequestError(_CUT_THROUGH)
        return "".join(text), "".join(masked)
