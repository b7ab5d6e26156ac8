"""The three programs as processes: both ways to run them, what they print, exit codes, drain and death."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.keys import content_hash
from core.server import CHANNEL_OPTIONS
from protos import common_pb2, encoder_pb2, encoder_pb2_grpc, prefill_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
STAGES = ["encoder", "prefill", "decode"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
    return {**kept, "TMPDIR": str(tmp_path), **extra}


def outcome(command: list[str], tmp_path: Path, **extra: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a program that ends by itself."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(tmp_path, **extra),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


class Service:
    """A running program that has said that it is ready."""

    def __init__(self, process: asyncio.subprocess.Process, ready: str) -> None:
        self.process = process
        match = re.fullmatch(r"ready (\w+) grpc=(\S+) metrics=(\S+)\n", ready)
        assert match is not None, ready
        self.stage, self.grpc, self.metrics = match.groups()

    async def end(self) -> tuple[int, str]:
        """Exit code and the rest of standard error."""
        _, errors = await asyncio.wait_for(self.process.communicate(), WAIT_S)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@asynccontextmanager
async def running(
    stage: str, model: str, tmp_path: Path, *options: str, **extra: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its first line of standard output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.services.serve_fake", stage, "serve", "--model", model),
        *("--port", "0", "--metrics-port", "0", *options),
        cwd=ROOT,
        env=environment(tmp_path, **extra),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        yield process, line.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def held_call(service: Service, channel: grpc.aio.Channel) -> Any:
    """A call that waits in the service's engine."""
    request = encoder_pb2.EncodeRequest(request_id="r", image=b"x", content_hash=content_hash(b"x"))
    call = encoder_pb2_grpc.EncoderStub(channel).Encode(request, timeout=WAIT_S)
    assert service.process.stdout is not None
    assert await asyncio.wait_for(service.process.stdout.readline(), WAIT_S) == b"held\n"
    return call


async def health_of(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)).status


@pytest.mark.parametrize("program", ["services.prefill", "router", "cli"])
def test_why_a_program_ends_is_written_at_once(program: str, tmp_path: Path) -> None:
    """What gathers the lines of a container reads as it likes, and Python does not buffer there."""
    arguments = {"services.prefill": ["serve"], "router": [], "cli": ["up"]}[program]
    ours, theirs = os.pipe2(os.O_DIRECT)  # each read has one write
    with os.fdopen(ours, "rb", buffering=0) as said:
        with os.fdopen(theirs, "wb") as end:
            code = subprocess.run(
                [sys.executable, "-m", program, *arguments, "--no-such-option"],
                cwd=ROOT,
                env=environment(tmp_path, PYTHONUNBUFFERED="1"),
                stderr=end,
                timeout=WAIT_S,
                check=False,
            ).returncode
        assert code == 2
        assert re.fullmatch(rb"error: .*no-such-option.*\n", said.read(4096))


@pytest.mark.parametrize("stage", STAGES)
def test_both_ways_to_run_it_show_the_same_help(stage: str, tmp_path: Path) -> None:
    by_module = outcome(["-m", f"services.{stage}", "serve", "--help"], tmp_path)
    by_folder = outcome([f"services/{stage}", "serve", "--help"], tmp_path)
    assert by_module == by_folder
    code, out, _ = by_module
    assert code == 0
    assert "--ec-transfer-config" in out
    assert "TRIPTYCH_MAX_MODEL_LEN" in out


# Runs the folder as Python does, in a process that has forgotten that the checkout is installed.
FOLDER_ALONE = """
import runpy, sys
root, folder = sys.argv[1:]
sys.path[:] = [entry for entry in sys.path if entry not in ("", root)]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__name__", "").lower()]
runpy.run_path(folder, run_name="not the program")
print(sys.modules["services.runtime"].__file__, folder in sys.path)
"""


@pytest.mark.parametrize("stage", STAGES)
def test_the_folder_finds_the_checkout_and_lends_its_own_names_to_nobody(stage: str, tmp_path: Path) -> None:
    folder = ROOT / "services" / stage
    done = subprocess.run(
        [sys.executable, "-c", FOLDER_ALONE, str(ROOT), str(folder)],
        cwd=tmp_path,
        env={**environment(tmp_path), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.stdout == f"{ROOT / 'services' / 'runtime.py'} False\n", done.stderr


@pytest.mark.parametrize(
    ("command", "extra", "message"),
    [
        (["services/encoder", "serve", "--port", "x"], {}, "error: --port='x': expected an integer from 0 to 65535"),
        (["services/decode", "serve", "--colour", "red"], {}, "error: No such option '--colour'."),
        (["services/prefill"], {}, "error: Missing command."),
        (["services/prefill", "serve", "--model", "/nowhere"], {}, "error: --model='/nowhere': not a folder"),
        (
            ["-m", "services.prefill", "serve"],
            {"TRIPTYCH_PORT": "tcp://10.0.0.1:1"},
            "error: --port='tcp://10.0.0.1:1': expected an integer from 0 to 65535 (from TRIPTYCH_PORT)",
        ),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    command: list[str], extra: dict[str, str], message: str, tmp_path: Path
) -> None:
    assert outcome(command, tmp_path, **extra) == (2, "", message + "\n")


def test_no_torch_where_grpc_is_spoken() -> None:
    program = (
        "import sys; import services.runtime, services.encoder.servicer, services.prefill.servicer, "
        "services.decode.servicer; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("config", 2, "error: --model='{model}': holds no weights"),
        ("engine", 1, "error: the engine did not start: out of memory"),
    ],
)
def test_an_engine_that_does_not_start_is_one_line(
    how: str, code: int, message: str, model: str, tmp_path: Path
) -> None:
    command = f"-m tests.services.serve_fake prefill serve --port 0 --metrics-port 0 --model {model}".split()
    assert outcome(command, tmp_path, FAKE_START=how) == (code, "", message.format(model=model) + "\n")


async def test_sigterm_finishes_what_is_in_flight(model: str, tmp_path: Path) -> None:
    async with running("encoder", model, tmp_path) as (process, line):
        service = Service(process, line)
        assert service.stage == "encoder"
        async with grpc.aio.insecure_channel(service.grpc, options=CHANNEL_OPTIONS) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            call = await held_call(service, channel)
            process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            process.send_signal(signal.SIGTERM)  # a second one changes nothing
            process.send_signal(signal.SIGUSR1)
            assert (await call).feature.num_embeds == 4
        code, errors = await service.end()
        assert code == 0, errors
        assert "drained" in errors


async def test_a_drain_has_an_end(model: str, tmp_path: Path) -> None:
    async with running("encoder", model, tmp_path, "--drain-timeout", "0.1") as (process, line):
        service = Service(process, line)
        async with grpc.aio.insecure_channel(service.grpc, options=CHANNEL_OPTIONS) as channel:
            call = await held_call(service, channel)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError):
                await call
        assert (await service.end())[0] == 0


async def test_a_dead_engine_ends_the_process(model: str, tmp_path: Path) -> None:
    async with running("encoder", model, tmp_path) as (process, line):
        service = Service(process, line)
        async with grpc.aio.insecure_channel(service.grpc, options=CHANNEL_OPTIONS) as channel:
            call = await held_call(service, channel)
            process.send_signal(signal.SIGUSR2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "encoder is unavailable: its engine died: killed by a test"
        code, errors = await service.end()
        assert code == 1
        assert len([line for line in errors.splitlines() if "the engine died: killed by a test" in line]) == 1
        assert "Traceback" not in errors


async def test_a_signal_during_the_start_ends_it(model: str, tmp_path: Path) -> None:
    async with running("prefill", model, tmp_path, FAKE_START="never") as (process, line):
        assert line == "starting\n"
        process.send_signal(signal.SIGTERM)
        out, errors = await asyncio.wait_for(process.communicate(), WAIT_S)
        assert (process.returncode, out) == (0, b""), errors


async def test_ports_and_metrics(model: str, tmp_path: Path) -> None:
    async with running("prefill", model, tmp_path) as (process, line):
        service = Service(process, line)
        address = f"http://{service.metrics}/metrics"
        reply = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=WAIT_S).read().decode())
        assert "\ntriptych:kv_leases 0.0\n" in reply
        async with grpc.aio.insecure_channel(service.grpc, options=CHANNEL_OPTIONS) as channel:
            assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
            stub = prefill_pb2_grpc.PrefillStub(channel)
            info = await stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=WAIT_S)
            assert (info.stage, info.model, info.kv_role) == ("prefill", "some-model", "kv_producer")
        for option, port in (("--port", service.grpc), ("--metrics-port", service.metrics)):
            taken = port.rpartition(":")[2]
            command = f"services/decode serve --port 0 --metrics-port 0 {option} {taken} --model {model}".split()
            message = f"error: {option}={taken}: in use on 127.0.0.1\n"
            assert await asyncio.to_thread(outcome, command, tmp_path) == (2, "", message)
