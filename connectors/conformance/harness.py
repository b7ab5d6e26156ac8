"""What the kit may do to a store behind a connector's back. Everything is optional: what a harness does not offer is
reported as "not tried".

A harness lives in the process that called `check`, on its thread, for the whole run; the checks run in processes of
their own and ask for it. So it may keep a server, a mount or a folder. Methods may block for some seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.struct import Struct


class NotTriedError(Exception):
    """This cannot be tried here; the reason stands in the report."""


class Damage(enum.StrEnum):
    """Ways to spoil one stored item."""

    FLIPPED_BIT = "flipped bit"  # one bit of the payload
    GARBAGE = "garbage"  # all of the record, header included, overwritten with other bytes
    TRUNCATED = "truncated"  # the last byte or more of the payload is not there
    EMPTIED = "emptied"  # the record is there and has no bytes at all
    SWAPPED = "swapped"  # its payload exchanged with `other`'s, headers as they were
    MISPLACED = "misplaced"  # all of `other`'s record, header included, in its place
    FOREIGN = "foreign"  # all of the record of the same key in `other`'s namespace in its place
    OLDER_VERSION = "older version"  # an older format: its number in the header, each payload byte inverted, and …
    NEWER_VERSION = "newer version"  # … a newer one: checksums that fit, so the number alone tells it


class StoredItem(Struct, frozen=True):
    """An item that a connector of `namespace` reported as saved."""

    namespace: str
    key: str


class Harness:
    """Base of harnesses: nothing can be done. Raise NotTriedError, with a reason, from what cannot be done here.

    The constructor gets a scratch folder that is removed after the run, and the operator's extra config.
    """

    def __init__(self, folder: Path, extra: Mapping[str, Any]) -> None:
        self.folder = folder
        self.operators_extra = extra

    # ---- configurations; each is merged over the ones before it ----

    def extra(self) -> Mapping[str, Any]:
        """Extra config with which a connector reaches this store."""
        return self.operators_extra

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        """Extra config under which every order is reported within `seconds`."""
        raise NotTriedError("no harness for `time_limit`")

    def capacity(self, num_bytes: int) -> Mapping[str, Any]:
        """Extra config for a store, empty so far, that is to hold `num_bytes` of items."""
        raise NotTriedError("no harness for `capacity`")

    def ttl(self, seconds: float) -> Mapping[str, Any]:
        """Extra config for a store, empty so far, whose items vanish `seconds` after they were saved."""
        raise NotTriedError("no harness for `ttl`")

    # ---- faults; each is undone before the check ends ----

    def stop(self) -> None:
        """From now on the store cannot be reached, by anybody."""
        raise NotTriedError("no harness for `stop`")

    def start(self) -> None:
        """After `stop`: it can be reached again; what it held may be lost."""
        raise NotTriedError("no harness for `start`")

    def fill(self) -> None:
        """From now on there is no room for an item of a megabyte."""
        raise NotTriedError("no harness for `fill`")

    def free(self) -> None:
        """After `fill`: there is room again."""
        raise NotTriedError("no harness for `free`")

    def slow(self, items: Sequence[StoredItem]) -> None:
        """From now on the store hangs, at least in loads of `items` and in saves that replace them."""
        raise NotTriedError("no harness for `slow`")

    def unslow(self) -> None:
        """After `slow`: it goes on, with what it was asked meanwhile too."""
        raise NotTriedError("no harness for `unslow`")

    def damage(self, item: StoredItem, how: Damage, other: StoredItem | None) -> None:
        """Spoil `item`. `other` is another stored item where `how` needs one."""
        raise NotTriedError("no harness for `damage`")

    # ---- questions ----

    def left_overs(self) -> list[str]:
        """What lies in the store and belongs to no item: temporaries, parts. While nobody uses the store."""
        raise NotTriedError("no harness for `left_overs`")

    def num_listings(self) -> int:
        """How often the store was asked to list what it holds since it was made. For stores that are servers: what a
        connector lists in files of this machine the kit sees by itself."""
        return 0

    # ---- the run ----

    def open(self) -> None:
        """Before the first check. May raise NotTriedError: then nothing is tried."""

    def restore(self) -> None:
        """After each check, however it ended: undo every fault that is still there."""

    def close(self) -> None:
        """After the last check, and after an error in `open`."""


#: What a check may ask of the harness by name, and nothing else.
CALLS = frozenset(
    {"extra", "time_limit", "capacity", "ttl", "stop", "start", "fill", "free", "slow", "unslow", "damage"}
    | {"left_overs", "num_listings"}
)


class OptionsHarness(Harness):
    """Where the user gave none: what a connector's own options allow, if they are named as those of ours."""

    def __init__(self, options: frozenset[str], extra: Mapping[str, Any]) -> None:
        super().__init__(Path(), extra)
        self._options = options

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return self._option("timeout_s", seconds)

    def ttl(self, seconds: float) -> Mapping[str, Any]:
        return self._option("ttl_s", seconds)

    def _option(self, name: str, value: float) -> Mapping[str, Any]:
        if name not in self._options:
            raise NotTriedError("no harness")
        return {**self.operators_extra, name: value}
