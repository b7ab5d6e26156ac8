"""A worker in a process of its own: what crosses to it, what it says, and what becomes of both when one dies."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from connectors.ec.base import BufferSlice, ECConnectorMetadata, ECLoad
from connectors.kv.base import KVConnectorMetadata, KVLayout, KVPull
from core.config import ConnectorConfig
from core.errors import ConfigError, EngineError
from core.images import read_header
from core.types import ECRole, Feature, KVHandle
from core.vision_grid import VisionGrid
from engine.client import AsyncMPClient
from engine.core import EngineCore
from engine.executor.base import WorkerSpec
from engine.executor.channel import MAX_MESSAGE_BYTES, Channel
from engine.executor.metadata import decode_metadata, encode_metadata, find_class, why_not
from engine.executor.multiprocess import MultiprocessExecutor
from engine.executor.wire import FromWorker, ToWorker, WorkerStart, error_of
from engine.executor.worker_process import WorkerProcess
from engine.memory import CacheSizes
from engine.scheduler_output import ImageToPrepare, SchedulerOutput
from tests.engine.engines import engine_config
from tests.engine.gated_connector import StepMetadata, TensorMetadata
from tests.pictures import picture

DEADLINE_S = 60.0
PICTURE = picture(1, 96, 64)
LAYOUT = KVLayout(1, "m", "float32", 1, 16, 1, 8)


def plugin(name: str) -> ConnectorConfig:
    return ConnectorConfig(name, "tests.engine.gated_connector")


class Started:
    """An executor of an encoder, started by hand."""

    def __init__(self, model: Path, store: Path) -> None:
        config = engine_config(model, store, ECRole.PRODUCER)
        self.told = threading.Event()
        spec = WorkerSpec(config, 256, "a" * 64, LAYOUT, "i")
        self.executor = MultiprocessExecutor(spec, ECConnectorMetadata, None, self.told.set)
        self.report = self.executor.load_model()
        self.handshakes = self.executor.initialize_caches(CacheSizes(0, 64))

    def step(self, **parts: Any) -> SchedulerOutput:
        return SchedulerOutput(ec_metadata=ECConnectorMetadata(), **parts)


@pytest.fixture
def started(tiny_model: Path, tmp_path: Path) -> Iterator[Started]:
    made = Started(tiny_model, tmp_path)
    yield made
    made.executor.shutdown()
    made.executor.shutdown()


def test_the_worker_reports_wakes_the_engine_and_its_death_ends_every_step(started: Started) -> None:
    executor = started.executor
    assert started.report.device == "cpu"
    assert started.report.loaded_bytes > 0
    assert (started.handshakes.ec, started.handshakes.kv) == ("", None)

    # What ends in the worker's background is told, though nobody asks.
    header = read_header(PICTURE)
    grid, num_embeds = VisionGrid.from_model(executor._start.spec.config.model).predict(header.width, header.height)
    feature = Feature("a" * 64, num_embeds, grid, 8)
    executor.execute_model(started.step(prepare=[ImageToPrepare(feature, PICTURE)])).result(DEADLINE_S)
    assert started.told.wait(DEADLINE_S)
    assert executor.execute_model(started.step()).result(DEADLINE_S).prepared == [feature.key]

    # Stopped, it has not answered either when it is killed.
    worker = psutil.Process(executor.pid)
    worker.suspend()
    futures = [executor.execute_model(started.step()) for _ in range(2)]
    executor.check_health()
    started.told.clear()
    worker.kill()
    for future in futures:
        with pytest.raises(EngineError, match=rf"worker 0 \(process {worker.pid}\) ended with code -9"):
            future.result(DEADLINE_S)
    assert started.told.wait(DEADLINE_S), "an idle engine is to find out as well"
    with pytest.raises(EngineError, match="ended with code -9"):
        executor.check_health()
    with pytest.raises(EngineError, match="ended with code -9"):
        executor.execute_model(started.step()).result(DEADLINE_S)


async def test_a_worker_ends_with_its_engine(tiny_model: Path, tmp_path: Path) -> None:
    client = AsyncMPClient(engine_config(tiny_model, tmp_path, distributed_executor_backend="mp"))
    info = await client.start()
    children = psutil.Process(info.pid).children()
    (worker,) = [child for child in children if "engine.executor.worker_process" in child.cmdline()]
    os.kill(info.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([worker], timeout=DEADLINE_S)
    for process in alive:
        process.kill()
    assert not alive
    await client.close()


def test_what_is_wrong_in_the_worker_s_process_is_raised_in_the_engine_s(tiny_model: Path, tmp_path: Path) -> None:
    """The worker's loop on a thread's end of the channel, for want of a second process that costs seconds."""
    config = engine_config(tiny_model, tmp_path / "nowhere", dtype="int8")
    start = WorkerStart(WorkerSpec(config, 256, "a" * 64, LAYOUT, "i"), [])
    ours, theirs = (Channel(end) for end in socket.socketpair())
    orders: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
    orders.put(ToWorker(sizes=CacheSizes(1, 1)))
    orders.put(ToWorker(shutdown=True))
    WorkerProcess(start, theirs).run(orders)
    answers = [msgspec.msgpack.decode(ours.receive() or b"", type=FromWorker) for _ in range(2)]
    error = error_of(answers[0].problem, "worker 0")
    assert isinstance(error, ConfigError)
    assert (error.name, error.value) == ("--dtype", "int8")
    error = error_of(answers[1].problem, "worker 0")
    assert isinstance(error, EngineError)
    assert str(error).startswith("worker 0: AssertionError")
    ours.close()
    theirs.close()


def test_a_plugin_s_metadata_arrives_whole_and_a_core_without_worker_ends(tiny_model: Path, tmp_path: Path) -> None:
    config = engine_config(tiny_model, tmp_path, distributed_executor_backend="mp")
    told = threading.Event()
    core = EngineCore(msgspec.structs.replace(config, ec_connector=plugin("CountingConnector")), told.set)
    try:
        core.executor.execute_model(core.scheduler.schedule()).result(DEADLINE_S)
        out = core.scheduler.schedule()
        made = core.executor.execute_model(out).result(DEADLINE_S)
        assert made.ec is not None
        assert made.ec.worker_metadata == b"3 {'m'} 7 -3", "one at the start, for its class, and one a step"
        assert isinstance(out.ec_metadata, StepMetadata), "what the engine keeps is as it was"

        told.clear()
        executor = core.executor
        assert isinstance(executor, MultiprocessExecutor)
        os.kill(executor.pid, signal.SIGKILL)
        assert told.wait(DEADLINE_S), "an idle engine is woken"
        with pytest.raises(EngineError, match=rf"worker 0 \(process {executor.pid}\) ended with code -9"):
            core.step()
    finally:
        core.close()


def test_metadata_that_cannot_cross_is_refused_before_anything_is_started(tiny_model: Path, tmp_path: Path) -> None:
    config = engine_config(tiny_model, tmp_path, distributed_executor_backend="mp")
    with pytest.raises(ConfigError, match=r"TensorMetadata holds a Tensor.*backend uni") as caught:
        EngineCore(msgspec.structs.replace(config, ec_connector=plugin("TensorConnector")), lambda: None)
    assert (caught.value.name, caught.value.value) == ("--ec-connector", "TensorConnector")


def test_an_unknown_backend_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="uni, mp") as caught:
        EngineCore(engine_config(tiny_model, tmp_path, distributed_executor_backend="ray"), lambda: None)
    assert caught.value.name == "--distributed-executor-backend"


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        ECConnectorMetadata([ECLoad("k", BufferSlice(3, 4))]),
        KVConnectorMetadata([KVPull("r", KVHandle("C", b"\0\xff", 5), [1, 2])]),
        StepMetadata(
            [ECLoad("k", BufferSlice(3, 4))], 5, {"a"}, [(1, StepMetadata([], 2)), (3, ECConnectorMetadata())]
        ),
    ],
)
def test_metadata_is_the_same_on_both_sides(metadata: ECConnectorMetadata | KVConnectorMetadata | None) -> None:
    made = decode_metadata(encode_metadata(metadata))
    assert made == metadata
    assert type(made) is type(metadata)
    if isinstance(metadata, StepMetadata):
        assert [type(inner) for _, inner in made.inner] == [StepMetadata, ECConnectorMetadata]


def test_only_metadata_classes_are_made_by_name() -> None:
    assert find_class("tests.engine.gated_connector:StepMetadata") is StepMetadata
    for name in ("subprocess:Popen", "core.types:KVHandle", "tests.engine.gated_connector:GATE"):
        with pytest.raises(EngineError, match="does not exist"):
            find_class(name)


def test_which_metadata_can_cross() -> None:
    class Box(msgspec.Struct):
        inner: ECConnectorMetadata

    Hidden = msgspec.defstruct("Hidden", [("box", Box | None, None)], bases=(ECConnectorMetadata,))  # noqa: N806
    assert why_not(ECConnectorMetadata) == why_not(KVConnectorMetadata) == why_not(StepMetadata) == ""
    assert "holds a Tensor" in why_not(TensorMetadata)
    assert "inside another structure" in why_not(Hidden)


def test_messages_come_whole_and_an_end_is_seen_at_once() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    large = os.urandom(1 << 20)  # more than a socket holds
    sender = threading.Thread(target=lambda: [theirs.send(message) for message in (b"a", b"", large)])
    sender.start()
    assert [ours.receive() for _ in range(3)] == [b"a", b"", large]
    sender.join(DEADLINE_S)
    theirs.close()
    theirs.close()
    assert ours.receive() is None
    with pytest.raises(EngineError, match="cannot be reached"):
        ours.send(b"b")
    ours.close()
    assert ours.receive() is None


def test_half_a_message_is_none_and_a_length_beyond_reason_is_an_error() -> None:
    end, raw = socket.socketpair()
    raw.sendall((5).to_bytes(8, "little") + b"abc")
    raw.close()
    channel = Channel(end)
    assert channel.receive() is None
    channel.close()
    end, raw = socket.socketpair()
    raw.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(8, "little"))
    channel = Channel(end)
    with pytest.raises(EngineError, match="the limit is"):
        channel.receive()
    channel.close()
    raw.close()
