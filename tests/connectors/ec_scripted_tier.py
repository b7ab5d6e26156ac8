"""A stranger's EC connector whose store lies in this process and does what a test tells it to: fail, hang, raise."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECConnectorOutput, ECSide


class ScriptedStore:
    """Shared by all connectors of its name. `calls` has what was asked of it, in order."""

    def __init__(self) -> None:
        self.items: dict[str, torch.Tensor] = {}
        self.calls: list[tuple[str, str]] = []
        self.fails: set[str] = set()  # of "look up", "load", "save"
        self.raises: set[str] = set()  # of "load", "save"
        self.looking: set[str] = set()  # keys that are looked up for ever
        self.hangs = False  # orders are kept until `go_on`
        self.roles: list[str] = []
        self.source = ""
        self.heard: list[tuple[str, str]] = []  # sources that were handed in
        self._lock = threading.Lock()
        self._kept: list[Callable[[], None]] = []

    def go_on(self) -> None:
        with self._lock:
            self.hangs = False
            kept, self._kept = self._kept, []
        for order in kept:
            order()

    def run(self, order: Callable[[], None]) -> None:
        with self._lock:
            if self.hangs:
                self._kept.append(order)
                return
        order()

    def count(self, what: str) -> int:
        return sum(call[0] == what for call in self.calls)


STORES: dict[str, ScriptedStore] = {}


class ScriptedConnector(ECConnectorBase):
    """`extra` has the store's name. Orders end within the call that begins them, unless the store hangs."""

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        super().__init__(config, side)
        self.store = STORES[config.extra["store"]]
        self.store.roles.append(str(config.role))
        self.finished: list[tuple[str, str, str | None]] = []
        self.num_closes = 0

    def has_cache_item(self, key: str) -> bool | None:
        self.store.calls.append(("look up", key))
        if key in self.store.looking:
            return None
        return "look up" not in self.store.fails and key in self.store.items

    def item_source(self, key: str) -> str:
        return self.store.source

    def add_item_source(self, key: str, source: str) -> None:
        self.store.heard.append((key, source))

    def start_load_caches(self) -> None:
        assert self._metadata is not None
        for load in self._metadata.loads:
            self.store.calls.append(("load", load.key))
            if "load" in self.store.raises:
                raise RuntimeError("a stranger's mistake")
            rows = self._buffer[load.where.start : load.where.start + load.where.num_rows]

            def run(key: str = load.key, rows: torch.Tensor = rows) -> None:
                rows.fill_(-1)  # what a failed load may leave behind
                item = self.store.items.get(key)
                reason = None if item is not None and "load" not in self.store.fails else "scripted failure"
                if reason is None and item is not None:
                    rows.copy_(item)
                self._end("load", key, reason)

            self.store.run(run)

    def save_caches(self, key: str, embeds: torch.Tensor) -> None:
        self.store.calls.append(("save", key))
        if "save" in self.store.raises:
            raise RuntimeError("a stranger's mistake")

        def run() -> None:
            if "save" not in self.store.fails:
                self.store.items[key] = embeds.clone()
            self._end("save", key, "scripted failure" if "save" in self.store.fails else None)

        self.store.run(run)

    def get_finished(self) -> ECConnectorOutput:
        finished, self.finished = self.finished, []
        output = ECConnectorOutput()
        for what, key, reason in finished:
            if what == "load" and reason is None:
                output.finished_loading.append(key)
                output.seconds_loading.append(0.0)
            elif what == "load":
                output.failed_loading[key] = str(reason)
            elif reason is None:
                output.finished_saving.append(key)
                output.seconds_saving.append(0.0)
            else:
                output.failed_saving[key] = reason
        return output

    def close(self) -> None:
        self.num_closes += 1

    def _end(self, what: str, key: str, reason: str | None) -> None:
        self.finished.append((what, key, reason))
        self.config.notify()
