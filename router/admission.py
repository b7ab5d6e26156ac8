"""How much the router takes on: requests in flight, the bytes of their images, and the work that is under way at once.

    with admission.request(tenant):                                  # a place for the time of the request
        job = ...                                                    # checked, hashed
        with admission.images(size_bytes, tenant):                   # room for its files
            async with admission.turn(tenant, cost, job.priority):   # its turn; waits while all hands are full
                ...                                                  # the stages

Each refusal is an OverloadedError at once, and says when it may be worth trying again. What was let in is never
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

from core.errors import OverloadedError
from router.metrics import RouterMetrics
from router.settings import RouterSettings
from router.shares import Shares
from router.turns import Turns

#: How often the decode workers' KV caches may be under way at once, where the operator set no limit.
_KV_CACHES = 2


class Admission:
    """Limits and what is held of them. Event loop only.

    Where the operator trusts somebody to tell tenants apart, each has its share of every limit.
    """

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics, kv_capacity: Callable[[], int]) -> None:
        """`kv_capacity`: tokens that the KV caches of the decode workers hold together, 0 while nobody knows."""
        is_fair = settings.trust_tenant_header
        self._metrics = metrics
        self._requests = Shares(settings.max_inflight, is_fair=is_fair)
        self._image_bytes = Shares(settings.max_image_bytes_held, is_fair=is_fair)
        self._turns = Turns(
            # What decodes and what is about to, so that decode never waits for the stages before it.
            lambda: settings.max_work or _KV_CACHES * kv_capacity() / settings.processes,
            max_queue=settings.max_queue,
            max_queue_s=settings.max_queue_s,
            is_fair=is_fair,
            metrics=metrics,
        )

    @property
    def num_running(self) -> int:
        """Requests in flight, those included that wait for their turn."""
        return self._requests.held

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._turns.num_waiting

    @property
    def image_bytes(self) -> int:
        return self._image_bytes.held

    @contextmanager
    def request(self, tenant: str = "") -> Iterator[None]:
        """One place for the time of a request. Raises OverloadedError at once where there is none."""
        with self._hold(self._requests, tenant, 1, "inflight", "requests in flight"):
            self._metrics.running.set(self.num_running)
            try:
                yield
            finally:
                self._metrics.running.set(self.num_running - 1)

    @contextmanager
    def images(self, size_bytes: int, tenant: str = "") -> Iterator[None]:
        """Room for a request's image bytes for as long as it may need them. Raises OverloadedError as above."""
        with self._hold(self._image_bytes, tenant, size_bytes, "images", "bytes of images in flight"):
            yield

    def turn(self, tenant: str, cost: int, priority: int = 0) -> AbstractAsyncContextManager[None]:
        """A request's turn, see `Turns.turn`."""
        return self._turns.turn(tenant, cost, priority)

    @contextmanager
    def _hold(self, shares: Shares, tenant: str, amount: int, reason: str, what: str) -> Iterator[None]:
        shortage = shares.shortage(tenant, amount)
        if shortage is not None:
            self._metrics.reject(reason)
            raise OverloadedError(f"{what}: {shortage}", retry_after_s=self._turns.next_end_s())
        shares.take(tenant, amount)
        try:
            yield
        finally:
            shares.give_back(tenant, amount)
