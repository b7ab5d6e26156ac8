"""Whether what a worker says can be true. A worker that is broken, or something else than it was, must not reach a
client through us, nor another stage."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc

from core.convert import feature_from_proto
from core.errors import IncompatibleError, InvalidRequestError, TriptychError
from protos import common_pb2, decode_pb2, encoder_pb2, prefill_pb2

_FINISH_REASONS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class NonsenseError(Exception):
    """A worker's answer does not hold. The text is for our log; `error` is what the client is told where no other
    worker does better, if that is more than that the stage failed."""

    def __init__(self, what: str, error: TriptychError | None = None) -> None:
        super().__init__(what)
        self.error = error


def _present(message: Any, what: str) -> None:
    # grpc.aio answers None for bytes that are no such message.
    if message is None or message is grpc.aio.EOF:
        raise NonsenseError(f"{what} is no message")


def check_encoded(response: encoder_pb2.EncodeResponse, key: str) -> None:
    """An encoder's answer for the item `key`. Raises NonsenseError."""
    _present(response, "its answer")
    if response.feature.key != key:
        # Its namespace is another one: it has other weights, say.
        raise NonsenseError(
            "it answers with another item", IncompatibleError("item key", key, response.feature.key[: len(key)])
        )
    try:
        feature_from_proto(response.feature)
    except InvalidRequestError as error:
        raise NonsenseError(str(error)) from error


def check_prefilled(response: prefill_pb2.PrefillResponse, keys: Collection[str]) -> None:
    """A prefill worker's answer to a prompt whose items are `keys`. Raises NonsenseError."""
    _present(response, "its answer")
    outcome = response.WhichOneof("outcome")
    if outcome == "missing":
        _check_missing(response.missing, keys)
        return
    if outcome is None:
        raise NonsenseError("it answers nothing")
    done: prefill_pb2.Prefilled = response.prefilled
    if not done.prompt_token_ids:
        raise NonsenseError("its prompt has no tokens")
    if any(placed.feature.key not in keys for placed in done.features):
        raise NonsenseError("its prompt has an item that is not the request's")
    is_finished = done.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
    if is_finished == done.HasField("kv") or (is_finished and done.finish_reason not in _FINISH_REASONS):
        raise NonsenseError("it neither finished the request nor kept its blocks")


def check_decoded(message: decode_pb2.DecodeResponse, keys: Collection[str], num_left: int) -> None:
    """A message of a decode stream that may bring at most `num_left` more tokens. Raises NonsenseError."""
    _present(message, "its message")
    if len(message.token_ids) > num_left:
        raise NonsenseError("it sends more tokens than were asked for")
    if message.HasField("finished"):
        if message.finished.finish_reason not in _FINISH_REASONS:
            raise NonsenseError("it ends for no reason")
    elif message.HasField("missing"):
        _check_missing(message.missing, keys)


def _check_missing(missing: common_pb2.MissingItems, keys: Collection[str]) -> None:
    if not missing.keys:
        raise NonsenseError("it misses items and names none")
    if any(key not in keys for key in missing.keys):
        raise NonsenseError("it misses an item that is not part of the request")
