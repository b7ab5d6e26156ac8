"""Turns output tokens into text as they come, and never gives out part of a character.

For every sequence of token ids, however it is divided into pushes and over workers, the texts of all pushes and of
`finish` together are `tokenizer.decode(ids, skip_special_tokens)`.

Byte-level tokenizers (Qwen's and most others), whose tokens are strings of bytes, go through Python's incremental UTF-8
decoder: it holds back an unfinished character, at most three bytes of it, and replaces a broken one as soon as it is
known to be broken. For others (SentencePiece's) the tokenizer decodes a window of tokens that begins with the last text
given out, since there a token's text depends on its neighbours.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\ufffd"


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte in a byte-level tokenizer's vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTES = _byte_of_character()


class IncrementalDetokenizer:
    """Text of one request's output. Used by one task at a time; what a push costs does not depend on the output so far.

    Args:
        tokenizer: only read, so all requests may share one.
        skip_special_tokens: special tokens leave no text.
        prior_token_ids: output tokens made by another worker, which gave out their text by the same rule; what it held
            back comes with the next push here.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prior_token_ids: Sequence[int] = ()) -> None:
        decoder = _ByteLevel if isinstance(tokenizer.decoder, decoders.ByteLevel) else _Window
        self._decoder: _ByteLevel | _Window = decoder(tokenizer, skip_special_tokens)
        self.push(prior_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; "" while a character is unfinished. Ids without a token leave no text."""
        return "".join([self._decoder.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Text still held back, with U+FFFD for a character that now stays unfinished. The last call."""
        return self._decoder.finish()


class _ByteLevel:
    """Exact for any bytes: Python's decoder and the tokenizer's both replace each maximal part of a broken one."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return ""
        try:
            data = bytes([_BYTES[character] for character in token])
        except KeyError:  # an added token is written as it is
            data = token.encode()
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Decodes from the last text given out, which is context for what follows, such as the space between two words.

    A text that ends in U+FFFD waits for the rest of its character, up to `_MAX_HELD` tokens.
    """

    # A character has at most four bytes, and each may be a token of its own.
    _MAX_HELD = 4

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_given = 0  # leading tokens of the window whose text was given out

    def push(self, token_id: int) -> str:
        if token_id in self._special or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        given = self._text(self._window[: self._num_given])
        text = self._text(self._window)
        num_held = len(self._window) - self._num_given
        if len(text) <= len(given):
            return ""
        if text.endswith(_REPLACEMENT) and num_held < self._MAX_HELD and not final:
            return ""
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return text[len(given) :]

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)
