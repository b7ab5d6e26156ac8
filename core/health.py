"""`grpc.health.v1`, answered from memory on the server's own event loop.

The servicer that ships with grpcio-health-checking never ends a `Watch`, so one idle watcher would hold a draining
server for its whole grace period. This one ends its watches once the server drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


#: Always SERVING while the event loop answers: what a liveness probe asks, which must not end a process that only
#: loads its model or drains.
LIVENESS = "liveness"


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package ships no types
    """One status for the whole server (service name "") and for each of its services, and one for each of `parts`: no
    services, but names for what it needs. All start as NOT_SERVING. And LIVENESS, which has no other than SERVING."""

    def __init__(self, service_names: Iterable[str], parts: Iterable[str] = ()) -> None:
        self._names = frozenset({"", *service_names})
        self._parts = dict.fromkeys(parts, False)
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()
        self._num_watches = 0

    @property
    def is_watched(self) -> bool:
        """Whether somebody hears of changes at once."""
        return self._num_watches > 0

    def set_serving(self, serving: bool) -> None:
        """Change the status and tell every watcher. Event loop only; without effect after `close`."""
        self._serving = serving and not self._closed
        self._wake()

    def set_parts(self, serving: Mapping[str, bool]) -> None:
        """Change the status of parts, as above. Raises KeyError for a name that is none."""
        changed = {name: is_serving for name, is_serving in serving.items() if self._parts[name] != is_serving}
        if changed and not self._closed:
            self._parts.update(changed)
            self._wake()

    def close(self) -> None:
        """NOT_SERVING for good; every watch sends that and ends."""
        self._closed = True
        self.set_serving(False)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return int(_SERVING)
        if service in self._parts:
            return int(_SERVING if self._parts[service] and not self._closed else _NOT_SERVING)
        if service not in self._names:
            return int(_UNKNOWN)
        return int(_SERVING if self._serving else _NOT_SERVING)

    async def Check(  # noqa: N802 - the name of the RPC
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service named {request.service[:100]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802 - the name of the RPC
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        self._num_watches += 1
        try:
            while True:
                changed = self._changed
                status = self._status(request.service)
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                if self._closed:
                    return
                last = status
                await changed.wait()
        finally:
            self._num_watches -= 1
