"""Answers a request whose bytes are no message of the method's type with INVALID_ARGUMENT.

grpc itself would say INTERNAL, which is the word for a fault of ours, and log a traceback.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from core.errors import InvalidRequestError, to_status

_MALFORMED = object()


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """For methods that take one message and are coroutines, which all of ours are; others pass as they are."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(behaviour):
            return handler
        parse = handler.request_deserializer

        def parse_or_mark(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                return _MALFORMED

        async def behave(request: Any, context: Any) -> Any:
            if request is _MALFORMED:
                error = InvalidRequestError("the request's bytes are no message of the type that the method takes")
                await context.abort(*to_status(error))
            return await behaviour(request, context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(behave, parse_or_mark, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(behave, parse_or_mark, handler.response_serializer)
