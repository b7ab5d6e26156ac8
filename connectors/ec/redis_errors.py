"""What Redis or the way to it can answer instead of doing its work, in words that an operator can act on."""

from __future__ import annotations

import ssl

import redis

from connectors.ec.store import StoreError

_MAX_TEXT_CHARS = 160


class UnreachableError(StoreError):
    """No answer: no connection, a broken one, or a server that is silent."""


class ServerError(StoreError):
    """The server answered with an error, `code` being its first word."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


class RedirectedError(ServerError):
    """Another server is in charge of this key now."""


#: By the first word of Redis's error replies.
_REASONS = {
    "OOM": "Redis is full: maxmemory is reached and its maxmemory-policy evicts nothing that would make room",
    "NOAUTH": "Redis wants a password, and none is set",
    "WRONGPASS": "Redis refuses user name or password",
    "LOADING": "Redis is starting and still loads its data",
    "MISCONF": "Redis cannot write its data to disk and refuses writes until it can",
    "CLUSTERDOWN": "the Redis cluster is down: some of its hash slots have no server",
    "MASTERDOWN": "Redis is a replica that has lost its master",
    "BUSY": "Redis is busy with somebody's script",
    "NOREPLICAS": "Redis refuses writes because too few replicas follow it",
}
_REDIRECTIONS = {
    "MOVED": "the key's hash slot lives on another server of the cluster",
    "ASK": "the key's hash slot is being moved to another server of the cluster",
    "TRYAGAIN": "the key's hash slot is being moved to another server of the cluster",
    "READONLY": "Redis is a read-only replica",
}


def server_error(text: str) -> ServerError:
    """From the text of an error reply."""
    code, _, rest = text.partition(" ")
    if code in _REDIRECTIONS:
        return RedirectedError(f"{_REDIRECTIONS[code]} ({code})", code)
    if code in _REASONS:
        return ServerError(f"{_REASONS[code]} ({code})", code)
    rest = "".join(c if c.isprintable() else "?" for c in rest[:_MAX_TEXT_CHARS])
    if code == "NOPERM":
        return ServerError(f"the ACL of Redis forbids it ({code}): {rest}", code)
    hint = "; Redis 6.2 or later is needed" if rest.lower().startswith("unknown command") else ""
    return ServerError(f"Redis answers with an error ({code[:40]}): {rest}{hint}", code)


def explain(error: redis.RedisError | OSError) -> StoreError:
    """From an exception of redis-py or of a socket."""
    code = getattr(error, "status_code", None)
    if code is not None:
        return server_error(f"{code} {error}")
    if isinstance(error, redis.AuthenticationError):
        return server_error(f"WRONGPASS {error}")
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return UnreachableError("Redis did not answer in time")
    if isinstance(error, redis.ResponseError):
        return server_error(str(error))
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return UnreachableError(f"the certificate of Redis is not trusted: {cause.verify_message}")
    if isinstance(cause, ssl.SSLError):
        return UnreachableError(f"TLS with Redis failed: {cause.reason or 'no reason given'}")
    if isinstance(cause, OSError) and cause.strerror:
        return UnreachableError(f"Redis cannot be reached: {cause.strerror}")
    return UnreachableError("Redis closed the connection")
