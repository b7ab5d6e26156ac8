"""Connectors' orders on their way to a worker process.

A plugin's metadata may be a subclass with more fields, and may hold metadata of other connectors in lists, tuples and
dictionaries, as that of tiers does. Decoded by the type that a field declares, a subclass would lose what it adds, so
each metadata travels with the name of its class, and is made anew from it. No class is imported by name: it must be
among those that the connectors' modules have defined in this process already.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from connectors.ec.base import ECConnectorMetadata
from connectors.kv.base import KVConnectorMetadata
from core.errors import EngineError

Metadata = ECConnectorMetadata | KVConnectorMetadata
_BASES = (ECConnectorMetadata, KVConnectorMetadata)
#: msgpack's extension codes for what it cannot tell apart by itself.
_METADATA, _TUPLE = 1, 2


def type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def encode_metadata(metadata: Metadata | None) -> bytes:
    """Raises TypeError where a field holds what msgpack cannot say."""
    return msgspec.msgpack.encode(_named(metadata))


def decode_metadata(data: bytes) -> Any:
    """The same again. Raises EngineError where a class is unknown here, ValidationError where a field does not fit."""
    return msgspec.msgpack.decode(data, ext_hook=_from_extension)


@cache
def find_class(name: str) -> type[Any]:
    """The metadata class of that name. Raises EngineError where this process has none."""
    for base in _BASES:
        for cls in _family(base):
            if type_name(cls) == name:
                return cls
    raise EngineError(f"the metadata class {name} does not exist in the worker's process")


def why_not(cls: type[Any]) -> str:
    """What keeps instances of a metadata class from crossing; "" where they can."""
    try:
        for problem in _problems(inspect.type_info(cls), set(), plain=False):
            return f"its metadata class {type_name(cls)} holds {problem}"
    except (TypeError, NameError) as error:
        return f"its metadata class {type_name(cls)} cannot be encoded: {error}"
    return ""


def _named(value: Any) -> Any:
    """`value` with its metadata, and tuples around it, as extensions; all else as it is."""
    if isinstance(value, _BASES):
        fields = [_named(getattr(value, name)) for name in value.__struct_fields__]
        return msgspec.msgpack.Ext(_METADATA, msgspec.msgpack.encode([type_name(type(value)), fields]))
    if not _holds_metadata(value):
        return value
    if isinstance(value, dict):
        return {key: _named(part) for key, part in value.items()}
    parts = [_named(part) for part in value]
    return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(parts)) if isinstance(value, tuple) else parts


def _from_extension(code: int, data: memoryview) -> Any:
    values = msgspec.msgpack.decode(data, ext_hook=_from_extension)
    if code == _TUPLE:
        return tuple(values)
    if code != _METADATA:
        raise EngineError(f"a connector's orders hold an extension {code}, which is none of ours")
    name, fields = values
    cls, hints = find_class(name), _hints(name)
    return cls(
        **{
            field: value if _holds_metadata(value) else msgspec.convert(value, hints[field])
            for field, value in zip(cls.__struct_fields__, fields, strict=True)
        }
    )


def _holds_metadata(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_metadata, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_metadata, value))
    return isinstance(value, _BASES)


@cache
def _hints(name: str) -> dict[str, Any]:
    return typing.get_type_hints(find_class(name))


def _family(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    for cls in base.__subclasses__():
        yield from _family(cls)


def _problems(node: Any, seen: set[tuple[int, bool]], *, plain: bool) -> Iterator[str]:
    """What cannot cross among the types below `node`. `plain`: inside a structure that is encoded by its declared type
    alone."""
    if (id(node), plain) in seen:
        return
    seen.add((id(node), plain))
    if isinstance(node, inspect.CustomType):
        yield f"a {node.cls.__name__}, which does not cross to another process"
    elif isinstance(node, tuple):
        for part in node:
            yield from _problems(part, seen, plain=plain)
    elif isinstance(node, inspect.Type | inspect.Field):
        if isinstance(node, inspect.StructType):
            is_metadata = issubclass(node.cls, _BASES)
            if is_metadata and plain:
                yield "metadata inside another structure, which does not cross to another process"
            plain = not is_metadata
        for name in node.__struct_fields__:
            yield from _problems(getattr(node, name), seen, plain=plain)
