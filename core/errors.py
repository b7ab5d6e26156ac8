"""Every error that Triptych raises on purpose, and its gRPC status.

    TriptychError                       status                 who is to act
    ├── ConfigError                     (exit code 2)          the operator: an option or a file is wrong
    ├── InvalidRequestError             INVALID_ARGUMENT       the client: names the part and the limit
    ├── IncompatibleError               FAILED_PRECONDITION    the operator: two stages differ; holds both values
    ├── OverloadedError                 RESOURCE_EXHAUSTED     the client, later
    ├── StageUnavailableError           UNAVAILABLE            names the stage; another worker may serve
    ├── DeadlineExceededError           DEADLINE_EXCEEDED      nobody: the caller's time is over
    ├── RequestCancelledError           CANCELLED              nobody: the caller went away
    └── EngineError                     INTERNAL               us

The messages go to clients as they are, so they hold no paths of the server and no tracebacks. Anything that is not a
`TriptychError` is `INTERNAL` with a fixed text; the log has the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc


class TriptychError(Exception):
    """Base of all. `str(error)` is fit for a client."""


class ConfigError(TriptychError):
    """An option, an environment variable or a file of the operator's is wrong. Raised at the start only."""

    def __init__(self, name: str, value: object, reason: str) -> None:
        super().__init__(f"{name}={value!r}: {reason}")
        self.name = name
        self.value = value
        self.reason = reason


class InvalidRequestError(TriptychError):
    """The request can never succeed. The message names the part and the limit."""


class IncompatibleError(TriptychError):
    """Two stages do not fit together: other weights, dtype, preprocessing or block layout."""

    def __init__(self, what: str, ours: object, theirs: object) -> None:
        super().__init__(f"{what} differs between stages: ours is {ours}, theirs is {theirs}")

    @classmethod
    def from_message(cls, message: str) -> IncompatibleError:
        """The error that another process described."""
        error = cls.__new__(cls)
        Exception.__init__(error, message)
        return error


class OverloadedError(TriptychError):
    """Nothing was done; the same request may succeed later, after `retry_after_s` seconds where that is known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StageUnavailableError(TriptychError):
    """A stage, or what it depends on, cannot serve at the moment; `retry_after_s` as above."""

    def __init__(self, stage: str, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"{stage} is unavailable: {reason}")
        self.stage = stage
        self.retry_after_s = retry_after_s


class DeadlineExceededError(TriptychError):
    """The caller's deadline passed before the answer was complete."""


class RequestCancelledError(TriptychError):
    """The caller cancelled."""


class EngineError(TriptychError):
    """A fault of ours that ends a request, or the engine."""


#: By name, because a machine that only measures kernels has no grpc.
_STATUS: dict[type[BaseException], str] = {
    ConfigError: "FAILED_PRECONDITION",
    InvalidRequestError: "INVALID_ARGUMENT",
    IncompatibleError: "FAILED_PRECONDITION",
    OverloadedError: "RESOURCE_EXHAUSTED",
    StageUnavailableError: "UNAVAILABLE",
    DeadlineExceededError: "DEADLINE_EXCEEDED",
    RequestCancelledError: "CANCELLED",
    EngineError: "INTERNAL",
}


def to_status(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Status code and details for the wire. Never holds a traceback or the text of a foreign exception."""
    import grpc

    for cls in type(error).__mro__:
        code = _STATUS.get(cls)
        if code is not None:
            return grpc.StatusCode[code], str(error)
    return grpc.StatusCode.INTERNAL, "internal error; the server's log has more"


#: Exit code of a program whose options or files are wrong (the shell's own convention for usage errors).
EXIT_CONFIG = 2
