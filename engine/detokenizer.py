"""Turns output tokens into text as they come, and never gives out part of a character.

For every sequence of token ids, however it is divided into pushes and over workers, the texts of all pushes and of
`finish` together are `tokenizer.decode(ids, skip_special_tokens)`. Three kinds of tokenizers do it three ways:

- Byte-level ones (Qwen's and most others), whose tokens are strings of bytes, go through Python's incremental UTF-8
  decoder: it holds back an unfinished character, at most three bytes of it, and replaces a broken one as soon as it is
  known to be broken.
- Those that spell rare characters in byte tokens (SentencePiece's, such as Llama's) judge a whole run of byte tokens at
  once: one wrong byte, and every byte of the run becomes U+FFFD. So a run is held back until it ends or is known to be
  wrong. A script without tokens of its own would then show nothing until its next space, so a run of more than
  `_MAX_RUN` bytes gives out its whole characters as they come. This is the one exception to the rule above: where such
  a run goes wrong after all, the characters given out stay, and U+FFFD stands for the bytes from there on.
- For all others the tokenizer decodes a window of tokens that begins with the last text given out, since there a
  token's text depends on its neighbours. The rule holds where a decoder only adds to the text of the tokens before.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\ufffd"
#: A byte token, read as the tokenizers library reads it.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")
#: Bytes of a run of byte tokens that are held back while they may still prove wrong.
_MAX_RUN = 64


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
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._decoder = _decoder_of(tokenizer)
        self.push(prior_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; "" while a character is unfinished. Ids without a token leave no text."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Text still held back, with U+FFFD for a character that now stays unfinished. The last call."""
        return self._decoder.finish()

    def _push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return ""
        return self._decoder.push(token_id, token)


class _ByteLevel:
    """Exact for any bytes: Python's decoder and the tokenizer's both replace each maximal part of a broken one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int, token: str) -> str:
        try:
            data = bytes([_BYTES[character] for character in token])
        except KeyError:  # an added token is written as it is
            data = token.encode()
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Decodes from the last text given out, which is context for what follows, such as the space between two words.

    A text that ends in U+FFFD waits for the rest of its character, up to `max_held` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, max_held: int = 4) -> None:  # a character has at most four bytes
        self._tokenizer = tokenizer
        self._max_held = max_held
        self._window: list[int] = []
        self._num_given = 0  # leading tokens of the window whose text was given out

    def push(self, token_id: int, token: str) -> str:
        return self.extend([token_id])

    def extend(self, token_ids: Sequence[int]) -> str:
        """Push several tokens whose text may depend on one another."""
        self._window.extend(token_ids)
        return self._take(final=False)

    def restart(self, token_id: int) -> str:
        """Text of what is held; from here on, `token_id`, whose text must not be "", is the context."""
        text = self._take(final=True)
        self._window, self._num_given = [token_id], 1
        return text

    def finish(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        given = self._text(self._window[: self._num_given])
        text = self._text(self._window)
        num_held = len(self._window) - self._num_given
        if len(text) <= len(given):
            return ""
        if text.endswith(_REPLACEMENT) and num_held < self._max_held and not final:
            return ""
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return text[len(given) :]

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""


class _ByteRuns:
    """Judges each run of byte tokens as a whole, and leaves the text of all else to a window."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._window = _Window(tokenizer, max_held=0)
        self._begin_run()

    def _begin_run(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._held: list[int] = []  # byte tokens of the run whose text was not given out
        self._unfinished: list[int] = []  # those at its end that make no whole character yet
        self._num_bytes = 0
        self._is_wrong = False

    def push(self, token_id: int, token: str) -> str:
        spelled = _BYTE_TOKEN.fullmatch(token)
        if spelled is None:
            return self._end_run() + self._window.push(token_id, token)
        if self._is_wrong:
            return _REPLACEMENT
        self._num_bytes += 1
        self._held.append(token_id)
        self._unfinished.append(token_id)
        try:
            whole = self._decoder.decode(bytes([int(spelled[1], 16)]))
        except UnicodeDecodeError:
            return self._replace_held()
        if whole:
            self._unfinished = []
        if self._num_bytes <= _MAX_RUN:
            return ""
        given, self._held = self._held[: len(self._held) - len(self._unfinished)], self._unfinished.copy()
        return self._window.extend(given)

    def finish(self) -> str:
        return self._end_run() + self._window.finish()

    def _end_run(self) -> str:
        if not self._num_bytes:
            return ""
        text = self._replace_held() if self._unfinished else self._window.extend(self._held)
        self._begin_run()
        return text

    def _replace_held(self) -> str:
        """U+FFFD for each byte held, and for all that follow in this run."""
        # The first byte of a broken character is no character by itself, so its text is U+FFFD: a context.
        text = self._window.restart(self._unfinished[0]) + _REPLACEMENT * len(self._held)
        self._held, self._unfinished, self._is_wrong = [], [], True
        return text


def _decoder_of(tokenizer: Tokenizer) -> _ByteLevel | _ByteRuns | _Window:
    decoder = tokenizer.decoder
    if isinstance(decoder, decoders.ByteLevel):
        return _ByteLevel()
    if decoder is not None and decoder.decode(["<0x41>"]) == "A":
        return _ByteRuns(tokenizer)
    return _Window(tokenizer)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)
