"""Option values that name themselves when they do not parse.

click's own types stop with a usage text of several lines; these raise ConfigError, which names the option, the value
and, where it came from the environment, the variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from core.errors import ConfigError


def env_var(option: str) -> str:
    """`--max-model-len` -> `TRIPTYCH_MAX_MODEL_LEN`."""
    return "TRIPTYCH_" + option.removeprefix("--").replace("-", "_").upper()


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in later releases of click
    """An option whose text goes through `parse`; a ValueError there means that the text is not `expected`."""

    def __init__(self, name: str, parse: Callable[[str], Any], expected: str) -> None:
        self.name = name  # what --help shows
        self._parse = parse
        self._expected = expected

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name if "|" in self.name else self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default, or converted already
        try:
            return self._parse(value)
        except ValueError as error:
            reason = f"expected {self._expected}"
            option = param.opts[0] if param is not None else self.name
            if ctx is not None and param is not None and param.name is not None:
                source = ctx.get_parameter_source(param.name)
                if source is ParameterSource.ENVIRONMENT:
                    reason += f" (from {env_var(option)})"
            raise ConfigError(option, value, reason) from error


def integer(low: int, high: int | None = None) -> Parsed:
    """An integer within [low, high]."""

    def parse(text: str) -> int:
        number = int(text)
        if number < low or (high is not None and number > high):
            raise ValueError(text)
        return number

    return Parsed(
        "integer", parse, f"an integer from {low} to {high}" if high is not None else f"an integer, at least {low}"
    )


def number(low: float, high: float, *, above: bool = False) -> Parsed:
    """A number within [low, high], or with `above` within (low, high]."""

    def parse(text: str) -> float:
        value = float(text)
        # NaN fails the first comparison.
        if not low <= value <= high or (above and value == low):
            raise ValueError(text)
        return value

    return Parsed(
        "number", parse, f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
    )


def choice(*values: str) -> Parsed:
    """One of the words given, in any case; the result has the case of `values`."""
    # Members of a StrEnum become plain texts, so that errors show them as they were given.
    by_fold = {value.casefold(): str(value) for value in values}

    def parse(text: str) -> str:
        try:
            return by_fold[text.strip().casefold()]
        except KeyError:
            raise ValueError(text) from None

    return Parsed("|".join(values), parse, f"one of {', '.join(values)}")


def text(max_length: int) -> Parsed:
    """A word or name: 1 to `max_length` printable characters."""

    def parse(value: str) -> str:
        if not 1 <= len(value) <= max_length or not value.isprintable():
            raise ValueError(value)
        return value

    return Parsed("text", parse, f"1 to {max_length} printable characters")


def json_object() -> Parsed:
    """A JSON object, as a dict."""

    def parse(value: str) -> dict[str, Any]:
        # msgspec's ValidationError and DecodeError are ValueErrors.
        return msgspec.json.decode(value, type=dict[str, Any])

    return Parsed("json", parse, "a JSON object")
