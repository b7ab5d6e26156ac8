"""One EC connector, both sides, over a buffer that holds one item."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.connectors.items import DTYPE, NAMESPACE, WIDTH
from connectors.ec.base import BufferSlice, ECConnectorConfig, ECItem, ECSide, never
from connectors.factory import make_ec_connector
from core.config import ConnectorConfig
from core.types import ECRole

_TIMEOUT_S = 60.0


class Sides:
    """Used by one thread, as a step thread uses it. Raises RuntimeError for a failure of any kind: what is measured
    must go well."""

    def __init__(
        self,
        connector: ConnectorConfig,
        role: ECRole,
        item: torch.Tensor,
        is_crowded: Callable[[], bool] = never,
    ) -> None:
        self._rung = threading.Event()
        extra: Mapping[str, Any] = {"timeout_s": _TIMEOUT_S, **connector.extra}
        config = ECConnectorConfig(role, NAMESPACE, DTYPE, WIDTH, extra, self._rung.set, is_crowded)
        self.item = item  # [num_rows, WIDTH]; loads go there, saves come from there
        self.scheduler = make_ec_connector(connector, config, ECSide.SCHEDULER)
        self.worker = make_ec_connector(connector, config, ECSide.WORKER)
        self.worker.register_caches(item)
        self.scheduler.set_handshake(self.worker.handshake())

    def begin_load(self, key: str) -> None:
        num_rows = len(self.item)
        self.scheduler.update_state_after_alloc(ECItem(key, num_rows), BufferSlice(0, num_rows))
        self._step()

    def save(self, key: str) -> str:
        """Save the item; where it can be had."""
        self.worker.save_caches(key, self.item)
        self.wait()
        return self.scheduler.item_source(key)

    def load(self, key: str) -> None:
        self.begin_load(key)
        self.wait()

    def look_up(self, keys: list[str]) -> None:
        """Ask for all of them at once, and then for each until it is answered."""
        self.scheduler.ensure_cache_available(keys)
        for key in keys:
            while self.scheduler.has_cache_item(key) is None:
                self._ring()

    def poll(self) -> bool:
        """Whether a load or save has ended since the last call."""
        output = self.worker.get_finished()
        counters = [name for side in (self.worker, self.scheduler) for name, by in side.take_counters().items() if by]
        if output.failed_loading or output.failed_saving or [name for name in counters if name != "evictions"]:
            raise RuntimeError(f"what should have gone well did not: {output}, {counters}")
        if output:
            self.scheduler.update_connector_output(output)
        return bool(output.finished_loading or output.finished_saving)

    def wait(self) -> None:
        """Until a load or save has ended."""
        while not self.poll():
            self._ring()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    def _step(self) -> None:
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta())
        self.worker.start_load_caches()
        self.worker.clear_connector_metadata()

    def _ring(self) -> None:
        if not self._rung.wait(_TIMEOUT_S):
            raise RuntimeError("nothing was reported for a minute")
        self._rung.clear()
