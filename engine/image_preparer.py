"""Decodes and preprocesses images in the background, so that the step loop never waits for a JPEG."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from core.errors import InvalidRequestError
from core.images import decode_rgb
from core.types import Feature
from engine.models.adapter import ModelAdapter

logger = logging.getLogger(__name__)


class ImagePreparer:
    """Keeps prepared images until the tower takes them. `submit`, `poll`, `take` and `forget` on the step thread."""

    def __init__(
        self, adapter: ModelAdapter, device: torch.device, num_threads: int, notify: Callable[[], None]
    ) -> None:
        self._adapter = adapter
        self._device = device
        self._notify = notify
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
        self._pending: dict[str, Future[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._ended: list[tuple[str, Future[torch.Tensor]]] = []
        self._pixels: dict[str, torch.Tensor] = {}

    def submit(self, feature: Feature, image: bytes) -> None:
        """Begin with an image."""
        key = feature.key
        future = self._pool.submit(self._prepare, feature, image)
        self._pending[key] = future
        future.add_done_callback(lambda done: self._end(key, done))

    def poll(self) -> tuple[list[str], dict[str, str]]:
        """Keys that became ready, and what was wrong with those that did not, since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        ready: list[str] = []
        failed: dict[str, str] = {}
        for key, future in ended:
            if self._pending.get(key) is not future:
                continue  # forgotten, and perhaps submitted anew
            del self._pending[key]
            error = future.exception()
            if error is None:
                self._pixels[key] = future.result()
                ready.append(key)
            elif isinstance(error, InvalidRequestError):
                failed[key] = str(error)
            else:
                logger.error("image of item %s could not be prepared", key, exc_info=error)
                failed[key] = "the image could not be prepared"
        return ready, failed

    def take(self, key: str) -> torch.Tensor:
        """The pixel values of a ready image, on the device. They are forgotten here."""
        return self._pixels.pop(key).to(self._device)

    def forget(self, key: str) -> None:
        """Nobody wants this image any more."""
        future = self._pending.pop(key, None)
        if future is not None:
            future.cancel()
        self._pixels.pop(key, None)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, feature: Feature, image: bytes) -> torch.Tensor:
        pixels, grid = self._adapter.preprocess(decode_rgb(image))
        if grid != feature.grid:
            # Never to be papered over: the prompt was laid out for the predicted grid.
            raise InvalidRequestError(f"image: its header predicts the grid {feature.grid}, its pixels give {grid}")
        return pixels

    def _end(self, key: str, future: Future[torch.Tensor]) -> None:
        with self._lock:
            self._ended.append((key, future))
        self._notify()
