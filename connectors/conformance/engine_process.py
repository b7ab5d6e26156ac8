"""An engine in a process of its own: for many at once, and for one that is killed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import xxhash

from connectors.conformance.channel import Channel, ChannelError, SilentError
from connectors.conformance.ends import DTYPES, FailedError, RefusedError, expect, payload
from connectors.conformance.engine import SLACK_S, Engine, Setup, count_down
from connectors.conformance.factory import ConnectorFactory
from connectors.conformance.processes import fork, kill
from connectors.ec.store import bytes_of

#: A client that is silent for so long has gone.
_IDLE_S = 600.0


class Piece(msgspec.Struct, frozen=True):
    """An item as both processes can make it: `payload(rows, …, key, variant)`."""

    key: str
    rows: int
    variant: str = ""

    def make(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return payload(self.rows, width, dtype, self.key, self.variant)


def checksum(embeds: torch.Tensor) -> str:
    """Of the bytes."""
    return str(xxhash.xxh3_128_hexdigest(bytes_of(embeds)))


class EngineProcess:
    """The client's end. Each method waits for the other process, and raises FailedError with what it says."""

    def __init__(self, path: str, factory: ConnectorFactory, setup: Setup, sources: dict[str, str]) -> None:
        self._limit_s = setup.limit_s
        self._sources = sources
        self.pid, self._channel = fork(path, "engine", factory=factory, setup=setup)
        self._is_over = False
        try:
            self._answer(30.0)
        except BaseException:
            self.kill()
            raise

    def save(self, piece: Piece) -> str:
        """Why it failed, or ""."""
        self.begin_save(piece)
        answer = self._answer(self._limit_s + 2 * SLACK_S)
        self._sources[piece.key] = answer["source"]
        return str(answer["reason"])

    def begin_save(self, piece: Piece) -> None:
        """Has it saved; the answer is left for `kill` to throw away. Returns before the save begins."""
        self._channel.send(do="save", piece=piece)

    def fetch(self, piece: Piece) -> tuple[str, str]:
        """Why there is no item, or ""; and the item's checksum."""
        self.begin_fetch(piece)
        answer = self._answer(2 * self._limit_s + 3 * SLACK_S)
        return str(answer["reason"]), str(answer["checksum"])

    def begin_fetch(self, piece: Piece) -> None:
        """As `begin_save`."""
        self._channel.send(do="fetch", piece=piece, sources=self._sources)

    def begin_writing(self, pieces: Sequence[Piece], seconds: float) -> None:
        """Save the pieces over and over. `writing_ended` has the result."""
        self._channel.send(do="write", pieces=pieces, seconds=seconds)

    def begin_reading(self, pieces: Sequence[Piece], seconds: float, allowed: Sequence[str]) -> None:
        """Fetch the pieces over and over; whatever is found must have one of the checksums `allowed`."""
        self._channel.send(do="read", pieces=pieces, seconds=seconds, allowed=allowed, sources=self._sources)

    def ended(self, timeout_s: float) -> int:
        """Of `begin_writing` or `begin_reading`: how many saves or loads went well."""
        answer = self._answer(timeout_s)
        for key, source in answer.get("sources", {}).items():
            self._sources[key] = source
        return int(answer["count"])

    def close(self) -> None:
        """In order, as an engine ends."""
        if not self._is_over:
            self._channel.send(do="close")
            self._answer(10.0)
            self._end()

    def kill(self) -> None:
        """SIGKILL."""
        if not self._is_over:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        kill(self.pid, self._channel)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            message = self._channel.receive(timeout_s)
        except SilentError:
            raise FailedError(f"an engine in another process was silent for {timeout_s:g} s") from None
        except ChannelError as error:
            raise FailedError(f"an engine in another process ended: {error}") from None
        if "exit" in message:
            raise FailedError(f"an engine in another process ended with status {message['exit']}")
        if "refused" in message:
            raise RefusedError(message["refused"])
        if "failed" in message:
            raise FailedError(f"in another process: {message['failed']}")
        return message


def serve_engine(channel: Channel, _path: str, factory: Any, setup: Any) -> None:
    """The other process's whole life."""
    settings = msgspec.convert(setup, Setup)
    dtype = DTYPES[settings.dtype]
    try:
        engine = Engine(msgspec.convert(factory, ConnectorFactory), settings, dtype, {})
        channel.send(ready=True)
        while True:
            message = channel.receive(_IDLE_S)
            if message["do"] == "close":
                engine.close()
                channel.send(closed=True)
                return
            channel.send(**_ERRANDS[message.pop("do")](engine, dtype, message))
    except FailedError as error:
        channel.send(failed=str(error))
    except RefusedError as error:
        channel.send(refused=str(error))


def _save(engine: Engine, dtype: torch.dtype, message: dict[str, Any]) -> dict[str, Any]:
    piece = msgspec.convert(message["piece"], Piece)
    reason = engine.save(piece.key, piece.make(engine.setup.width, dtype))
    return {"reason": reason, "source": engine.sources.get(piece.key, "")}


def _fetch(engine: Engine, dtype: torch.dtype, message: dict[str, Any]) -> dict[str, Any]:
    piece = msgspec.convert(message["piece"], Piece)
    engine.sources.update(message["sources"])
    loaded = engine.fetch(piece.key, piece.rows)
    engine.check_buffer()
    return {"reason": loaded.reason, "checksum": "" if loaded.embeds is None else checksum(loaded.embeds)}


def _write(engine: Engine, dtype: torch.dtype, message: dict[str, Any]) -> dict[str, Any]:
    pieces = msgspec.convert(message["pieces"], list[Piece])
    made = {piece.key: piece.make(engine.setup.width, dtype) for piece in pieces}
    count = 0
    for piece in count_down(pieces, message["seconds"]):
        reason = engine.save(piece.key, made[piece.key])
        expect(not reason, f"a save of what others save too failed: {reason}")
        count += 1
    engine.settle()
    return {"count": count, "sources": engine.sources}


def _read(engine: Engine, dtype: torch.dtype, message: dict[str, Any]) -> dict[str, Any]:
    pieces = msgspec.convert(message["pieces"], list[Piece])
    engine.sources.update(message["sources"])
    allowed = set(message["allowed"])
    count = 0
    for piece in count_down(pieces, message["seconds"]):
        embeds = engine.fetch(piece.key, piece.rows).embeds
        if embeds is not None:
            expect(checksum(embeds) in allowed, "a reader got a tensor that no writer wrote")
            count += 1
    engine.settle()
    return {"count": count}


_ERRANDS = {"save": _save, "fetch": _fetch, "write": _write, "read": _read}
