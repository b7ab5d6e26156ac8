"""When a refused request is worth sending again, as gRPC's trailing metadata says it: three times, for three readers.

- `retry-after`: whole seconds, rounded up, as HTTP has it; for people and simple clients.
- `grpc-retry-pushback-ms`: what gRPC's own retries obey (gRFC A6).
- `grpc-status-details-bin`: google.rpc.RetryInfo within google.rpc.Status, for clients of the richer error model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration

from core.errors import OverloadedError, StageUnavailableError
from protos import retry_pb2

# At most eleven days: it may come from somebody who is not well.
_MILLISECONDS = re.compile(r"[0-9]{1,9}")
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"


def retry_metadata(error: Exception, code: grpc.StatusCode, details: str) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata for a status; empty for an error that does not say when."""
    if not isinstance(error, OverloadedError | StageUnavailableError) or error.retry_after_s is None:
        return ()
    milliseconds = math.ceil(error.retry_after_s * 1000)
    delay = Duration()
    delay.FromMilliseconds(milliseconds)
    info = retry_pb2.RetryInfo(retry_delay=delay)
    status = retry_pb2.RpcStatus(
        code=code.value[0],
        message=details,
        details=[AnyMessage(type_url=_RETRY_INFO, value=info.SerializeToString())],
    )
    return (
        ("retry-after", str(math.ceil(milliseconds / 1000))),
        ("grpc-retry-pushback-ms", str(milliseconds)),
        ("grpc-status-details-bin", status.SerializeToString()),
    )


def retry_after_s(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """The seconds that a status's trailing metadata names; None where it names none."""
    for key, value in metadata:
        if key == "grpc-retry-pushback-ms" and isinstance(value, str) and _MILLISECONDS.fullmatch(value):
            return int(value) / 1000
    return None
