"""The stand-in for `msgspec.Struct` behaves as the original, in all that a bare machine's modules ask of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

import core.struct
from core.struct import StructStandIn

BASES: list[Any] = [msgspec.Struct, StructStandIn]


def make(base: Any) -> tuple[Any, Any, Any]:
    """The same three classes upon either base."""

    field: Any = msgspec.field if base is msgspec.Struct else dataclasses.field

    class Point(base, array_like=True, frozen=True):
        x: int
        y: int = 2

        @property
        def total(self) -> int:
            return self.x + self.y

    class Named(Point):
        name: str = ""

    class Bag(base, array_like=True):
        items: list[int] = []  # noqa: RUF012 - what is tested
        by_name: dict[str, int] = {}  # noqa: RUF012
        point: Point = field(default_factory=lambda: Point(1))

        def __bool__(self) -> bool:
            return bool(self.items)

    return Point, Named, Bag


def test_an_engine_uses_msgspec() -> None:
    assert core.struct.Struct is msgspec.Struct
    assert core.struct.field is msgspec.field


@pytest.mark.parametrize("base", BASES)
def test_values(base: Any) -> None:
    point, named, bag = make(base)
    assert point(1, 2) == point(x=1)
    assert point(1) != point(2)
    assert named(1, 2) != point(1, 2)
    assert hash(named(1, 2, "a")) == hash(named(1, 2, "a"))
    assert point(1).total == 3
    assert point.__struct_fields__ == ("x", "y")
    assert named(3, name="c").__struct_fields__ == ("x", "y", "name")
    assert (not bag(), bool(bag([1]))) == (True, True)
    with pytest.raises(TypeError):
        hash(bag())


@pytest.mark.parametrize("base", BASES)
def test_what_is_refused(base: Any) -> None:
    point, named, _ = make(base)
    for value in (point(1), named(1)):
        with pytest.raises(AttributeError):
            value.x = 5
    for arguments, keywords in (((), {}), ((1, 2, 3), {}), ((1,), {"z": 1})):
        with pytest.raises(TypeError):
            point(*arguments, **keywords)
    with pytest.raises(TypeError):
        type("Shared", (base,), {"__annotations__": {"items": "list[int]"}, "items": [1]})


@pytest.mark.parametrize("base", BASES)
def test_instances_share_no_default(base: Any) -> None:
    _, _, bag = make(base)
    first, second = bag(), bag()
    first.items.append(1)
    first.by_name["a"] = 1
    assert (second.items, second.by_name) == ([], {})
    assert first.point == second.point
    first.items = [2]
    assert first == bag([2], {"a": 1})
