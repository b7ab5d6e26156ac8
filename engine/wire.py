"""Messages between a front process and its engine process, as msgpack over ZMQ."""

from __future__ import annotations

import msgspec

from core.config import EngineConfig
from engine.protocol import EngineCoreOutputs, EngineCoreRequest, EngineInfo

#: The name of the engine's DEALER at the client's ROUTER.
ENGINE_IDENTITY = b"engine-0"


class EngineStart(msgspec.Struct):
    """The one line that an engine process reads from its standard input, as JSON."""

    config: EngineConfig
    input_address: str
    output_address: str


class InMessage(msgspec.Struct, array_like=True):
    """To the engine. Any of its parts may be set."""

    add: EngineCoreRequest | None = None
    abort: list[str] = []
    release: list[str] = []
    shutdown: bool = False


class Ready(msgspec.Struct, array_like=True):
    """The engine serves."""

    info: EngineInfo


class Fatal(msgspec.Struct, array_like=True):
    """The engine did not start. `kind` "config" carries a ConfigError's parts."""

    kind: str
    name: str
    value: str
    reason: str


class OutMessage(msgspec.Struct, array_like=True):
    """From the engine. One of its parts is set."""

    outputs: EngineCoreOutputs | None = None
    ready: Ready | None = None
    failed: Fatal | None = None
