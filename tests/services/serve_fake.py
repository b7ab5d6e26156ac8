"""`python -m tests.services.serve_fake prefill serve …`: a service's whole process around the fake engine.

The environment variable FAKE_START says how the engine's start ends: "config", "engine", "never", or well. Each request
is held, which a line on standard output says; SIGUSR1 lets them go on, SIGUSR2 kills the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from core.config import EngineConfig
from core.errors import ConfigError, EngineError
from core.types import Stage
from services.runtime import main
from tests.services.fake_engine import FakeEngine


async def start(config: EngineConfig) -> FakeEngine:
    match os.environ.get("FAKE_START"):
        case "config":
            raise ConfigError("--model", config.model, "holds\nno weights")
        case "engine":
            raise EngineError("the engine did not start: out of memory")
        case "never":
            print("starting", flush=True)
            await asyncio.Event().wait()
    engine = FakeEngine()
    engine.gate.clear()
    engine.on_entered = lambda: print("held", flush=True)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, engine.gate.set)
    loop.add_signal_handler(signal.SIGUSR2, engine.die, "killed by a test")
    return engine


if __name__ == "__main__":
    stage = Stage(sys.argv.pop(1))
    main(stage, start)
