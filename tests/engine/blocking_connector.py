"""A store that blocks for as long as a test wants it to. Found by this module's path."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from connectors.ec.store import ECStore, LoadTarget, SaveSource
from connectors.ec.store_connector import ECStoreConnector, StoreOptions

DEADLINE_S = 30.0


class Gate:
    """What passes says so and waits until it is open."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.opened.set()

    def close(self) -> None:
        self.reached.clear()
        self.opened.clear()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)


#: By what the store is asked for.
GATES = {"look-up": Gate(), "load": Gate(), "save": Gate()}


class BlockingConnector(ECStoreConnector):
    """Over a store that has every item and keeps none: what is loaded are zeros."""

    options_type = StoreOptions

    def open_store(self, options: StoreOptions) -> ECStore:
        return _Store()


class EmptyConnector(BlockingConnector):
    """Has no item."""

    def open_store(self, options: StoreOptions) -> ECStore:
        return _Store(has_items=False)


class _Store(ECStore):
    def __init__(self, *, has_items: bool = True) -> None:
        self._has_items = has_items

    def contains(self, keys: Sequence[str]) -> list[bool]:
        GATES["look-up"].pass_through()
        return [self._has_items] * len(keys)

    def read(self, key: str, target: LoadTarget) -> None:
        GATES["load"].pass_through()
        target.write(bytearray(target.num_bytes))

    def write(self, key: str, source: SaveSource) -> None:
        GATES["save"].pass_through()
        source.check()

    def close(self) -> None:
        """Nothing is held."""
