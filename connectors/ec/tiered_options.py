"""The extra config of ECTieredConnector."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec


class Write(enum.StrEnum):
    """When a tier is written to."""

    THROUGH = "through"  # always; the save waits for it
    BACK = "back"  # afterwards, from a copy
    FALLBACK = "fallback"  # when all the tiers before failed


class TierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `tiers`."""

    connector: Annotated[str, msgspec.Meta(min_length=1)]
    module_path: str | None = None  # None: one of ours, by name
    extra: dict[str, Any] = {}
    write: Write = Write.THROUGH


class TieredOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the extra config."""

    tiers: Annotated[list[TierOptions], msgspec.Meta(min_length=1, max_length=8)]  # fastest first
    promote: bool = True
    copy_bytes: Annotated[int, msgspec.Meta(ge=0)] = (
        256 << 20
    )  # host memory for promotions and for what is written back


def labels_of(tiers: Sequence[TierOptions]) -> list[str]:
    """A name for each tier, the same on every engine that has it: the class, and which of that class it is."""
    names = [tier.connector for tier in tiers]
    counts = [names[:i].count(name) for i, name in enumerate(names)]
    return [name if not count else f"{name}#{count + 1}" for name, count in zip(names, counts, strict=True)]
