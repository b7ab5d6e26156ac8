"""A connector's own settings: the JSON object of `--ec-connector-extra-config` or `--kv-connector-extra-config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from core.errors import ConfigError

EC_EXTRA = "--ec-connector-extra-config"
KV_EXTRA = "--kv-connector-extra-config"

Options = TypeVar("Options", bound=msgspec.Struct)


def parse_options(kind: type[Options], extra: Mapping[str, Any], option: str) -> Options:
    """`extra` as a `kind`, whose fields are the known keys and carry their ranges as `msgspec.Meta`.

    Raises ConfigError, naming `option`, the key and the value, for a key that is unknown, absent though required, of
    the wrong type or out of range.
    """
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key, value in extra.items():
        if key not in fields:
            raise ConfigError(f"{option} {key}", value, f"unknown key; the known ones are {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name not in extra:
            if field.required:
                raise ConfigError(f"{option} {name}", None, "is required")
            continue
        value = extra[name]
        # Python's JSON reader lets NaN and Infinity through, and no range holds NaN out.
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{option} {name}", value, "is not a finite number")
        try:
            values[name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{option} {name}", value, str(error)) from None
    return kind(**values)
