"""A Triptych router over gRPC as a target: `grpc://HOST:PORT`."""

from __future__ import annotations

import grpc

from cli.bench.load import BenchRequest, Record, TargetError
from cli.client import image_request
from core.server import CHANNEL_OPTIONS
from protos import common_pb2, router_pb2_grpc


class GrpcTarget:
    """See `cli.bench.load.Target`. Greedy, with end-of-sequence ignored."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    async def send(self, request: BenchRequest, record: Record) -> None:
        sampling = common_pb2.SamplingParams(
            temperature=0.0, max_tokens=request.output_len, min_tokens=request.output_len, ignore_eos=True
        )
        call = self._stub.Generate(image_request(request.prompt, request.images, sampling), timeout=request.timeout_s)
        try:
            async for response in call:
                if response.token_ids:
                    record.chunk(len(response.token_ids))
        except grpc.aio.AioRpcError as error:
            raise TargetError(error.code().name, error.details() or "") from error
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()
