"""The engine's process: it says what is wrong with its configuration, and no fault leaves one behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from core.errors import ConfigError, EngineError
from core.types import SamplingParams
from engine.client import _STOP_TIMEOUT_S, AsyncMPClient
from engine.protocol import EngineCoreRequest
from tests.engine.engines import engine_config

DEADLINE_S = 60

PARENT = """
import asyncio, sys
import msgspec
from core.config import EngineConfig
from engine.client import AsyncMPClient

async def main():
    client = AsyncMPClient(msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig))
    info = await client.start()
    print(info.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sockets are made; they must be gone afterwards."""
    # Not below tmp_path itself: a socket's path may have no more than 107 characters.
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)
        assert list(Path(short).iterdir()) == []


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


async def test_a_bad_folder_is_a_config_error_on_this_side_too(tmp_path: Path) -> None:
    before = children()
    client = AsyncMPClient(engine_config(tmp_path / "nowhere", tmp_path))
    with pytest.raises(ConfigError, match=r"has no config\.json") as caught:
        await client.start()
    assert (caught.value.name, caught.value.value) == ("--model", str(tmp_path / "nowhere"))
    await client.close()
    assert children() == before


async def test_a_cancelled_start_ends_the_process_at_once(tiny_model: Path, tmp_path: Path) -> None:
    before = children()
    client = AsyncMPClient(engine_config(tiny_model, tmp_path))
    begun_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):  # far less than the imports alone take
            await client.start()
    assert time.monotonic() - begun_s < _STOP_TIMEOUT_S, "it cannot hear a shutdown yet, so none is to be waited for"
    assert children() == before


async def test_a_start_without_a_place_for_sockets_leaves_nothing(
    tiny_model: Path, tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folders / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(EngineError, match="cannot be started"):
        await AsyncMPClient(engine_config(tiny_model, tmp_path)).start()
    deep.rmdir()


async def test_a_client_of_a_dead_engine_raises_engine_error(tiny_model: Path, tmp_path: Path) -> None:
    client = AsyncMPClient(engine_config(tiny_model, tmp_path))
    info = await client.start()
    receive = asyncio.create_task(client.receive())
    os.kill(info.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with code -9"):
        await receive
    request = EngineCoreRequest("r", 0.0, prompt_token_ids=[1], sampling=SamplingParams())
    for call in (client.add(request), client.abort(["r"]), client.release(["r"])):
        with pytest.raises(EngineError, match="cannot be reached"):
            await call
    await client.close()
    await client.close()


def test_the_engine_ends_with_its_parent(tiny_model: Path, tmp_path: Path, folders: Path) -> None:
    import msgspec

    config = msgspec.json.encode(engine_config(tiny_model, tmp_path))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folders)},
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    try:
        parent.stdin.write(config + b"\n")
        parent.stdin.flush()
        engine = psutil.Process(int(parent.stdout.readline()))
        assert "engine.core_process" in engine.cmdline()
    finally:
        parent.kill()
        parent.communicate(timeout=DEADLINE_S)
    _, alive = psutil.wait_procs([engine], timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    assert not alive
    # A parent that is killed cannot tidy up.
    for left in folders.iterdir():
        for file in left.iterdir():
            file.unlink()
        left.rmdir()


def test_a_process_that_holds_an_engine_needs_no_torch() -> None:
    code = "import engine.async_llm, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    made = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert made.stdout.strip() == "[]"
