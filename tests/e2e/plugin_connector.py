"""A connector such as a stranger would write: items in a folder as raw bytes, found by this module's path."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

from connectors.ec.base import ECConnectorBase, ECConnectorConfig, ECConnectorOutput, ECSide


class FolderConnector(ECConnectorBase):
    """Loads and saves on a thread each; look-ups are answered by a thread as well."""

    def __init__(self, config: ECConnectorConfig, side: ECSide) -> None:
        super().__init__(config, side)
        self._folder = Path(config.extra["folder"])
        self._folder.mkdir(exist_ok=True)
        self._known: dict[str, bool] = {}
        self._done = ECConnectorOutput()
        self._lock = threading.Lock()

    def has_cache_item(self, key: str) -> bool | None:
        answer = self._known.pop(key, None)
        if answer is None:
            threading.Thread(target=self._look, args=(key,), daemon=True).start()
        return answer

    def start_load_caches(self) -> None:
        for load in self._metadata.loads if self._metadata else []:
            rows = self._buffer[load.where.start : load.where.start + load.where.num_rows]
            threading.Thread(target=self._load, args=(load.key, rows), daemon=True).start()

    def save_caches(self, key: str, embeds: torch.Tensor) -> None:
        threading.Thread(target=self._save, args=(key, embeds), daemon=True).start()

    def get_finished(self) -> ECConnectorOutput:
        with self._lock:
            done, self._done = self._done, ECConnectorOutput()
        return done

    def close(self) -> None: ...

    def _look(self, key: str) -> None:
        self._known[key] = (self._folder / key).exists()
        self.config.notify()

    def _load(self, key: str, rows: torch.Tensor) -> None:
        data = torch.frombuffer(bytearray((self._folder / key).read_bytes()), dtype=torch.uint8)
        rows.view(torch.uint8).copy_(data.view(rows.shape[0], -1))
        with self._lock:
            self._done.finished_loading.append(key)
        self.config.notify()

    def _save(self, key: str, embeds: torch.Tensor) -> None:
        aside = self._folder / f"{key}.{threading.get_ident()}"
        aside.write_bytes(embeds.contiguous().view(torch.uint8).numpy().tobytes())
        os.replace(aside, self._folder / key)
        with self._lock:
            self._done.finished_saving.append(key)
        self.config.notify()
