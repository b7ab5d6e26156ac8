"""`Struct`, the base of the values that every machine must be able to import.

It is `msgspec.Struct`. A bare GPU machine, where kernels and the model runner are tested and measured, carries torch,
transformers and what these need, and no msgspec: there a dataclass takes its place. Nothing crosses a process boundary
on such a machine, so what the stand-in leaves out is the encoding, and `__slots__`. An engine always has msgspec.

Modules that such a machine never imports use msgspec itself.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

__all__ = ["Struct", "StructStandIn", "field"]


class StructStandIn:
    """What `msgspec.Struct` does to a subclass, by way of a dataclass: positional arguments in the order of the fields,
    equality within one class, a copy of an empty list, dict or set per instance, frozen ones hashable.

    `array_like` has to do with the encoding alone. As with msgspec, a subclass of a frozen class is frozen.
    """

    __struct_fields__: tuple[str, ...] = ()

    def __init_subclass__(cls, *, array_like: bool = False, frozen: bool | None = None) -> None:
        super().__init_subclass__()
        bases: list[Any] = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        if frozen is None:
            frozen = any(base.__dataclass_params__.frozen for base in bases)
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, list | dict | set):
                if default:
                    raise TypeError(f"{cls.__name__}.{name}: a default that is not empty would be shared; use `field`")
                setattr(cls, name, dataclasses.field(default_factory=type(default)))
        made: Any = dataclasses.dataclass(frozen=frozen)(cls)
        made.__struct_fields__ = tuple(each.name for each in dataclasses.fields(made))


if TYPE_CHECKING:
    from msgspec import Struct, field
else:
    try:
        from msgspec import Struct, field
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        Struct, field = StructStandIn, dataclasses.field
