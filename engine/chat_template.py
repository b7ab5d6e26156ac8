"""Renders a model's chat template, which is a Jinja program that came with the weights, in a sandbox.

What templates may expect (white-space settings, loop controls, `raise_exception`, `strftime_now`, `tojson`, the
`generation` tag, the names of the special tokens) is what transformers gives them (utils/chat_template_utils.py), so a
conversation renders to the same text here as there.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from core.errors import ConfigError, InvalidRequestError

#: A message as templates see it: role, and content as a string or a list of parts.
Message = dict[str, Any]

_PROBE = "probe of the content format"


class ChatTemplate:
    """A compiled template. Rendering has no effects, so it may be shared.

    Args:
        source: the Jinja text.
        special_tokens: names such as `bos_token` and their texts, as the template may use them.
        name: of the model's folder, for the error.

    Raises:
        ConfigError: the text is no Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = "") -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", "?")
            raise ConfigError("--model", name, f"chat template: line {line}: {error}") from None
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.takes_parts = self._takes_parts()

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text, with the opening of the answer.

        Raises:
            InvalidRequestError: the template refused the messages, or failed on them.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"messages: the chat template refused them: {error}") from None
        except Exception as error:  # templates are programs, and raise what programs raise
            raise InvalidRequestError(f"messages: the chat template failed on them: {type(error).__name__}") from None

    def _takes_parts(self) -> bool:
        """Whether the template reads a content that is a list of parts. Text-only ones print the list as it stands."""
        try:
            text = self.render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        except InvalidRequestError:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


def read_chat_template(
    model_dir: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate:
    """The template of a checkpoint: in chat_template.jinja, else chat_template.json, else tokenizer_config.json.

    Raises:
        ConfigError: there is none, or it is broken.
    """
    source: object = tokenizer_config.get("chat_template")
    try:
        if (path := model_dir / "chat_template.jinja").is_file():
            source = path.read_text(encoding="utf-8")
        elif (path := model_dir / "chat_template.json").is_file():
            source = json.loads(path.read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("--model", str(model_dir), f"{path.name} cannot be read: {type(error).__name__}") from None
    if isinstance(source, list):
        # Several templates by name; the one for chats without tools is called default.
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError("--model", str(model_dir), "has no chat template")
    return ChatTemplate(source, special_tokens, str(model_dir))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; here its content is printed as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # Local time, as in transformers: templates print today's date with it.
    return datetime.datetime.now().strftime(format)  # noqa: DTZ005
