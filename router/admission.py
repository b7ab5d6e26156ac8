"""How much the router takes on: requests in flight, and the bytes of their images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import OverloadedError
from router.metrics import RouterMetrics


class Admission:
    """Two limits and what is held of them. Event loop only."""

    def __init__(self, max_inflight: int, max_image_bytes: int, metrics: RouterMetrics) -> None:
        self._max_inflight = max_inflight
        self._max_image_bytes = max_image_bytes
        self._metrics = metrics
        self.num_running = 0
        self.image_bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """One place for the time of a request. Raises OverloadedError at once where there is none."""
        if self.num_running >= self._max_inflight:
            self._metrics.rejected.inc()
            raise OverloadedError(f"{self.num_running} requests are in flight, the limit is {self._max_inflight}")
        self.num_running += 1
        self._metrics.running.set(self.num_running)
        try:
            yield
        finally:
            self.num_running -= 1
            self._metrics.running.set(self.num_running)

    @contextmanager
    def images(self, size_bytes: int) -> Iterator[None]:
        """Room for a request's image bytes for as long as it may need them. Raises OverloadedError as above."""
        if self.image_bytes + size_bytes > self._max_image_bytes:
            self._metrics.rejected.inc()
            raise OverloadedError(
                f"images of requests in flight hold {self.image_bytes} bytes, the limit is {self._max_image_bytes}"
            )
        self.image_bytes += size_bytes
        try:
            yield
        finally:
            self.image_bytes -= size_bytes
