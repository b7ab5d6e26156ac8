"""Between requests and the KV connector: whose blocks are pulled from another engine, and whose are handed on."""

from __future__ import annotations

from typing import NamedTuple

from connectors.kv.base import SAME_HOST, KVConnectorBase, KVConnectorMetadata, KVConnectorOutput
from core.errors import IncompatibleError, TriptychError
from core.types import KVHandle, KVRole
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import EngineCoreRequest, ErrorKind
from engine.request import Ended, Request, RequestStatus
from engine.stats import StatsCollector


class Pulled(NamedTuple):
    """How a pull ended. Without a problem, the request's blocks hold all of its prompt but the last token."""

    request_id: str
    problem: str = ""
    road: str = ""
    given_up: bool = False  # the router gave the blocks up: nobody reads what the request would say


class KVGate:
    """Part of the scheduler. Step thread only. Without a connector it refuses whatever would need one."""

    def __init__(self, kv: KVCacheManager, connector: KVConnectorBase | None, stats: StatsCollector) -> None:
        self._kv = kv
        self._optional = connector
        self._stats = stats

    @property
    def _connector(self) -> KVConnectorBase:
        assert self._optional is not None, "refused by `objection`"
        return self._optional

    @property
    def has_orders(self) -> bool:
        """Whether a step is needed to carry orders to the worker side."""
        return self._optional is not None and self._optional.has_orders

    def objection(self, made: EngineCoreRequest) -> str:
        """Why this engine cannot do what the request asks for; empty where it can."""
        role = None if self._optional is None else self._optional.config.role
        for wanted, fits, what in (
            (made.hand_over, role is not None and role.produces, KVRole.PRODUCER),
            (made.kv is not None, role is not None and role.consumes, KVRole.CONSUMER),
        ):
            if wanted and not fits:
                return f"the request needs a {what}, this worker is {role or 'none'} (--kv-role, --kv-connector)"
        return ""

    def build_meta(self) -> KVConnectorMetadata | None:
        return None if self._optional is None else self._optional.build_connector_meta()

    # ---- pulling ----

    def expect(self, request: Request) -> None:
        """A new request. Its pull is ordered at its turn."""
        if request.kv is not None:
            self._connector.expect_recv(request.request_id, request.kv)

    def num_tokens_of(self, kv: KVHandle, request: Request) -> int | Ended:
        """How many tokens the handle brings, or how the request ends where it is not this request's."""
        try:
            num_tokens = self._connector.get_num_new_matched_tokens(kv)
        except TriptychError as error:
            is_foreign = isinstance(error, IncompatibleError)
            return _refused(ErrorKind.INCOMPATIBLE if is_foreign else ErrorKind.INVALID_REQUEST, str(error))
        wanted = request.num_tokens - 1
        if num_tokens != wanted:
            reason = f"the KV handle brings {num_tokens} tokens, the request needs {wanted}"
            return _refused(ErrorKind.INVALID_REQUEST, reason)
        return num_tokens

    def order(self, kv: KVHandle, request: Request) -> None:
        """Pull into the request's blocks, which belong to the connector until `take_output` tells of the end."""
        self._connector.update_state_after_alloc(request.request_id, kv, list(request.block_ids))

    def cancel(self, request: Request) -> None:
        """A pull that was ordered still comes to its end; one that was only expected does not."""
        self._connector.cancel_recv(request.request_id)

    def take_output(self, made: KVConnectorOutput) -> list[Pulled]:
        """What the worker side reports: leases are ended and counted here, pulls are the scheduler's."""
        self._connector.update_connector_output(made)
        self._stats.count("kv_transfer_bytes_total", made.bytes_received)
        self._stats.count("kv_leases_expired_total", len(made.expired_sending))
        self._stats.count("kv_transfer_retries_total", made.num_retries)
        self._stats.count("kv_transfers_same_host_total", sum(road == SAME_HOST for road in made.roads.values()))
        for seconds in made.seconds_receiving:
            self._stats.observe("kv_transfer_seconds", seconds)
        for request_id in made.finished_sending:
            if self._kv.has_lease(request_id):
                self._kv.end_lease(request_id)
        return [
            *(Pulled(request_id, road=made.roads.get(request_id, "")) for request_id in made.finished_recving),
            *(Pulled(request_id, reason) for request_id, reason in made.failed_recving.items()),
            *(Pulled(r, "the router gave the KV blocks up", given_up=True) for r in made.given_up_recving),
        ]

    # ---- handing on ----

    def lease(self, request: Request) -> KVHandle:
        """The request has ended; its blocks stay until they are pulled, released or expired."""
        handle = self._connector.request_finished(
            request.request_id, list(request.block_ids), request.num_computed_tokens
        )
        self._kv.lease(request)
        return handle

    def release(self, request_id: str) -> None:
        """The router gave a handle up. Unknown ids are ignored."""
        if self._kv.has_lease(request_id):
            self._connector.release(request_id)


def _refused(kind: ErrorKind, reason: str) -> Ended:
    return Ended(RequestStatus.FINISHED_ERROR, error_kind=kind, error=reason)
