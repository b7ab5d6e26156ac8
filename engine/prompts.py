"""Makes the engine's prompts: from messages through the model's chat template, or from token ids.

The tokens are those of the model's processor under transformers: `apply_chat_template(messages, tokenize=True,
add_generation_prompt=True)`, with each image's placeholder token repeated once for each of its embeddings. Other than a
tokenizer's, it puts the tokenizer's own tokens around the text (Llama's `<s>`), unless the template wrote the first.

Words of a client's that spell a special token stay words: `engine/special_tokens.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers

from core.errors import ConfigError, InvalidRequestError
from core.types import Feature, PlacedFeature
from engine.chat_template import Message, read_chat_template
from engine.special_tokens import SpecialTokenGuard

#: A message: role, and parts that are ("text", str) or ("image", None).
ChatMessage = tuple[str, Sequence[tuple[str, str | None]]]

ROLES = ("system", "user", "assistant")

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptProcessor:
    """Tokenizes prompts for one checkpoint. Made at the start; its methods have no effects and are safe on any thread.

    All of it is synchronous: a chat of some hundred tokens takes well under a millisecond, a text of 100,000 characters
    some 100 ms, so longer ones belong on a thread. Texts that cannot fit, however they are cut, are not tokenized.

    Attributes:
        eos_token_ids: tokens that end an answer.
        vocab_size: of the model; tokenizers may have fewer tokens.
        image_token_id: the placeholder.
        tokenizer: the checkpoint's own; only to be read.

    Raises:
        ConfigError: the folder lacks a file, or one is broken.
    """

    def __init__(self, model_dir: str, *, max_model_len: int, max_images: int) -> None:
        folder = Path(model_dir)
        config = _read_json(folder, "config.json")
        tokenizer_config = _read_json(folder, "tokenizer_config.json", required=False)
        self._max_tokens = max_model_len - 1  # one is left for the answer
        self._max_images = max_images
        self.image_token_id = _image_token_id(folder, config)
        self.tokenizer, plain, plain_inside = _read_tokenizers(folder, self.image_token_id)
        self.vocab_size = int((config.get("text_config") or config).get("vocab_size", self.tokenizer.get_vocab_size()))
        special_tokens = _special_tokens(tokenizer_config)
        self._template = read_chat_template(folder, tokenizer_config, special_tokens)
        self.eos_token_ids = _eos_token_ids(folder, config, self.tokenizer, special_tokens)
        self._max_chars = _max_chars(self.tokenizer, self._max_tokens)
        self._guard = SpecialTokenGuard(self.tokenizer, plain, plain_inside, self.image_token_id, self._template.source)
        self._bos = special_tokens.get("bos_token", "")
        self._before, self._after = _surrounding_ids(self.tokenizer)

    def process_chat(
        self, messages: Sequence[ChatMessage], features: Sequence[Feature]
    ) -> tuple[list[int], list[PlacedFeature]]:
        """Prompt tokens, placeholders expanded, and where each feature stands; features in the order of the images.

        Raises:
            InvalidRequestError: no messages, an unknown role, images and features that differ in number, too many of
                them, a prompt longer than `max_model_len - 1`, or a template that refuses the messages.
        """
        if not messages:
            raise InvalidRequestError("messages: none; at least 1 is needed")
        texts = []
        num_images = 0
        for number, (role, parts) in enumerate(messages, start=1):
            if role not in ROLES:
                raise InvalidRequestError(f"message {number}: role {role[:40]!r}; known are {', '.join(ROLES)}")
            for kind, text in parts:
                if kind == "text" and text is not None:
                    texts.append(_checked(text, number))
                elif kind == "image":
                    num_images += 1
                else:
                    raise InvalidRequestError(f"message {number}: a part that is neither text nor image")
        self._check_images(num_images, features)
        if num_images and not self._template.takes_parts:
            raise InvalidRequestError(f"messages: {num_images} images, but the model's chat template takes only text")
        num_chars = sum(map(len, texts))
        if self._max_chars is not None and num_chars > self._max_chars:
            raise InvalidRequestError(
                f"prompt: {num_chars} characters cannot be {self._max_tokens} tokens or fewer, the limit "
                "(max_model_len - 1)"
            )
        marked, marks = self._guard.mark(texts)
        rendered = self._template.render(self._template_messages(messages, marked))
        token_ids = self._guard.encode(rendered, marks)
        if not (self._bos and rendered.startswith(self._bos)):
            token_ids = [*self._before, *token_ids, *self._after]
        return self._place(token_ids, features)

    def process_tokens(
        self, token_ids: Sequence[int], features: Sequence[Feature]
    ) -> tuple[list[int], list[PlacedFeature]]:
        """As `process_chat`, for a prompt of tokens in which each image is one placeholder token.

        Raises:
            InvalidRequestError: no tokens, an id outside the vocabulary, or images or length as in `process_chat`.
        """
        if not token_ids:
            raise InvalidRequestError("token_ids: none; at least 1 is needed")
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"token_ids[{place}]: {token_id}; the vocabulary ends at {self.vocab_size - 1}"
                )
        self._check_images(len(features), features)
        return self._place(token_ids, features)

    def _check_images(self, num_images: int, features: Sequence[Feature]) -> None:
        if max(num_images, len(features)) > self._max_images:
            raise InvalidRequestError(
                f"prompt: {max(num_images, len(features))} images; the limit is {self._max_images}"
            )
        if num_images != len(features):
            raise InvalidRequestError(f"prompt: {num_images} images, but {len(features)} features")

    def _template_messages(self, messages: Sequence[ChatMessage], texts: Sequence[str]) -> list[Message]:
        """The messages as templates expect them, with `texts` in place of their own."""
        following = iter(texts)
        result: list[Message] = []
        for role, parts in messages:
            content = [
                {"type": "text", "text": next(following)} if kind == "text" else {"type": "image"} for kind, _ in parts
            ]
            if self._template.takes_parts:
                result.append({"role": role, "content": content})
            else:
                result.append({"role": role, "content": "".join(part["text"] for part in content)})
        return result

    def _place(self, token_ids: Sequence[int], features: Sequence[Feature]) -> tuple[list[int], list[PlacedFeature]]:
        places = [place for place, token_id in enumerate(token_ids) if token_id == self.image_token_id]
        if len(places) != len(features):
            raise InvalidRequestError(f"prompt: {len(places)} image placeholders, but {len(features)} features")
        # Before anything of that size is built: the counts come from the wire.
        length = len(token_ids) + sum(feature.num_embeds - 1 for feature in features)
        if any(feature.num_embeds < 1 for feature in features):
            raise InvalidRequestError("features: num_embeds must be at least 1")
        if length > self._max_tokens:
            raise InvalidRequestError(
                f"prompt: {length} tokens, images included; the limit is {self._max_tokens} (max_model_len - 1)"
            )
        expanded: list[int] = []
        placed: list[PlacedFeature] = []
        start = 0
        for place, feature in zip(places, features, strict=True):
            expanded.extend(token_ids[start:place])
            placed.append(PlacedFeature(feature=feature, offset=len(expanded)))
            expanded.extend([self.image_token_id] * feature.num_embeds)
            start = place + 1
        expanded.extend(token_ids[start:])
        return expanded, placed


def _checked(text: str, number: int) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"message {number}: the text holds half of a surrogate pair") from None
    return text


def _read_json(folder: Path, name: str, *, required: bool = True) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        if not required:
            return {}
        raise ConfigError("--model", str(folder), f"has no {name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError("--model", str(folder), f"{name} cannot be read: {type(error).__name__}") from None
    if not isinstance(content, dict):
        raise ConfigError("--model", str(folder), f"{name} holds no JSON object")
    return content


def _read_tokenizers(folder: Path, image_token_id: int) -> tuple[Tokenizer, Tokenizer, Tokenizer]:
    """The checkpoint's tokenizer, one that takes special tokens and the placeholder for plain text, and the same for
    text that is not the first of a prompt."""
    content = _read_json(folder, "tokenizer.json")
    for token in content.get("added_tokens") or []:
        # Only special tokens can be turned off, and some checkpoints have a placeholder that is not special.
        token["special"] = token.get("special") or token.get("id") == image_token_id
    try:
        own = Tokenizer.from_file(str(folder / "tokenizer.json"))
        plain = Tokenizer.from_str(json.dumps(content))
        plain_inside = Tokenizer.from_str(json.dumps(_without_first_space(content)))
    except Exception as error:  # the bindings raise bare Exception
        raise ConfigError("--model", str(folder), f"tokenizer.json cannot be read: {error}") from None
    for tokenizer in (plain, plain_inside):
        tokenizer.encode_special_tokens = True
    for tokenizer in (own, plain, plain_inside):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return own, plain, plain_inside


def _without_first_space(content: Any) -> Any:
    """The same tokenizer.json without the space that some tokenizers put before the first word of a prompt alone."""
    if isinstance(content, list):
        return [_without_first_space(entry) for entry in content]
    if not isinstance(content, dict):
        return content
    changed = {name: entry if name == "vocab" else _without_first_space(entry) for name, entry in content.items()}
    if content.get("type") == "Metaspace" and content.get("prepend_scheme") == "first":
        changed["prepend_scheme"] = "never"
    return changed


def _surrounding_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens that the tokenizer puts before and after every text. Settings beside tokenizer.json (`add_bos_token`) do
    not count, as in transformers."""
    around = list(tokenizer.encode("a", add_special_tokens=True).ids)
    bare = list(tokenizer.encode("a", add_special_tokens=False).ids)
    for start in range(len(around) - len(bare) + 1):
        if around[start : start + len(bare)] == bare:
            return around[:start], around[start + len(bare) :]
    return [], []


def _max_chars(tokenizer: Tokenizer, max_tokens: int) -> int | None:
    """Texts of more characters have more tokens, whatever they say. None where a tokenizer may drop characters."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    # A byte-level vocabulary spells each byte as one character. NFC makes at most four characters one.
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=1)
    match tokenizer.normalizer:
        case None:
            return longest * max_tokens
        case normalizers.NFC():
            return 4 * longest * max_tokens
    return None


def _image_token_id(folder: Path, config: dict[str, Any]) -> int:
    value = config.get("image_token_id", config.get("image_token_index"))
    if type(value) is not int:
        raise ConfigError("--model", str(folder), "config.json has no image_token_id")
    return value


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens, written as a string or as an object with the string in it."""
    values = {name: tokenizer_config.get(name) for name in _SPECIAL_NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _eos_token_ids(
    folder: Path, config: dict[str, Any], tokenizer: Tokenizer, special_tokens: dict[str, str]
) -> frozenset[int]:
    """From generation_config.json, else config.json, else its text_config, else the tokenizer's own."""
    sources = (_read_json(folder, "generation_config.json", required=False), config, config.get("text_config") or {})
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    own = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    return frozenset() if own is None else frozenset([own])
