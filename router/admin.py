"""`triptych.v1.Admin` on the wire: list, add and remove workers while the router runs."""

from __future__ import annotations

from typing import Any

import grpc
import msgspec

from core.convert import reject_unknown_fields
from core.errors import ConfigError, InvalidRequestError
from core.server import GrpcServer, check_bindable, guarded
from core.types import Stage
from protos import admin_pb2, admin_pb2_grpc
from router.roster import Workers
from router.settings import is_address

SERVICE_NAME = "triptych.v1.Admin"
_STAGES = {stage.value: stage for stage in (Stage.ENCODER, Stage.PREFILL, Stage.DECODE)}

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServicer):  # type: ignore[misc]  # generated code has no types
    """Event loop only."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def ListWorkers(  # noqa: N802 - the name of the RPC
        self, request: admin_pb2.ListWorkersRequest, context: _Context
    ) -> admin_pb2.ListWorkersResponse:
        async with guarded(context, "Admin.ListWorkers"):
            rows = await self._workers.rows()
            return admin_pb2.ListWorkersResponse(
                workers=[admin_pb2.WorkerStatus(**msgspec.structs.asdict(row)) for row in rows]
            )

    async def AddWorker(  # noqa: N802 - the name of the RPC
        self, request: admin_pb2.AddWorkerRequest, context: _Context
    ) -> admin_pb2.AddWorkerResponse:
        async with guarded(context, "Admin.AddWorker"):
            stage, address = checked(request)
            return admin_pb2.AddWorkerResponse(added=await self._workers.add(stage, address))

    async def RemoveWorker(  # noqa: N802 - the name of the RPC
        self, request: admin_pb2.RemoveWorkerRequest, context: _Context
    ) -> admin_pb2.RemoveWorkerResponse:
        async with guarded(context, "Admin.RemoveWorker"):
            stage, address = checked(request)
            return admin_pb2.RemoveWorkerResponse(removed=await self._workers.remove(stage, address))


def checked(request: admin_pb2.AddWorkerRequest | admin_pb2.RemoveWorkerRequest) -> tuple[Stage, str]:
    """Stage and address. Raises InvalidRequestError that names what is wrong."""
    reject_unknown_fields(request)
    if request.stage not in _STAGES:
        raise InvalidRequestError(f"stage={request.stage[:100]!r} is none of {', '.join(_STAGES)}")
    if not is_address(request.address):
        raise InvalidRequestError(f"address={request.address[:100]!r} is not HOST:PORT")
    return _STAGES[request.stage], request.address


async def start_admin(host: str, port: int, workers: Workers) -> GrpcServer:
    """Listen and serve. Raises ConfigError that names `--admin-port` or `--admin-host` where it cannot."""
    try:
        check_bindable(host, port, port_option="--admin-port")
    except ConfigError as error:
        name = "--admin-host" if error.name == "--host" else error.name
        raise ConfigError(name, error.value, error.reason) from None
    server = GrpcServer(host, port)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(workers), server.server)
    await server.start([SERVICE_NAME])
    server.set_serving(True)
    return server
