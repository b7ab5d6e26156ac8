"""One tier's worker side, as ECTieredConnector uses it: one order for a key at a time, each with what follows it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import torch

from connectors.ec.base import ECConnectorBase, ECConnectorMetadata, ECConnectorOutput

log = logging.getLogger(__name__)

#: Called once an order has ended: None, or why it failed.
Ended = Callable[[str | None], None]


class _Order:
    __slots__ = ("ended", "is_load", "start")

    def __init__(self, is_load: bool, start: Callable[[], None], ended: Ended) -> None:
        self.is_load = is_load
        self.start = start
        self.ended = ended


class Tier:
    """The worker's thread only. An order for a key for which another one is under way waits for it."""

    def __init__(self, connector: ECConnectorBase, label: str) -> None:
        self.connector = connector
        self.label = label
        self._under_way: dict[str, _Order] = {}
        self._waiting: dict[str, deque[_Order]] = {}

    def bind_and_start(self, metadata: ECConnectorMetadata) -> None:
        """Hand the tier its orders."""
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_caches()
        self.connector.clear_connector_metadata()

    def load(self, key: str, metadata: ECConnectorMetadata, ended: Ended) -> None:
        """Begin the one load that `metadata` orders."""
        self._put(key, _Order(True, lambda: self.bind_and_start(metadata), ended))

    def save(self, key: str, embeds: torch.Tensor, ended: Ended) -> None:
        """Begin to save; `embeds` must not change until it has ended."""
        self._put(key, _Order(False, lambda: self.connector.save_caches(key, embeds), ended))

    def collect(self) -> ECConnectorOutput:
        """What the tier reports, after everybody concerned was told."""
        output = self.connector.get_finished()
        for key in output.finished_loading:
            self._end(key, True, None)
        for key in output.finished_saving:
            self._end(key, False, None)
        for key, reason in output.failed_loading.items():
            self._end(key, True, reason)
        for key, reason in output.failed_saving.items():
            self._end(key, False, reason)
        return output

    def _put(self, key: str, order: _Order) -> None:
        if key in self._under_way:
            self._waiting.setdefault(key, deque()).append(order)
        else:
            self._start(key, order)

    def _start(self, key: str, order: _Order) -> None:
        self._under_way[key] = order
        try:
            order.start()
        except Exception as error:  # a stranger's connector, which should have reported it
            log.exception("%s raised", self.label)
            self._end(key, order.is_load, f"raised {type(error).__name__}")

    def _end(self, key: str, is_load: bool, reason: str | None) -> None:
        order = self._under_way.get(key)
        if order is None or order.is_load != is_load:
            return  # a connector that reports what nobody ordered, or twice
        del self._under_way[key]
        waiting = self._waiting.get(key)
        if waiting:
            following = waiting.popleft()
            if not waiting:
                del self._waiting[key]
            self._start(key, following)
        order.ended(reason)
