"""The worker in a process of its own, `engine.executor.worker_process`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from core.config import ConnectorConfig
from core.errors import ConfigError, EngineError
from engine.executor.base import (
    STOP_TIMEOUT_S,
    Executor,
    Handshakes,
    WorkerReport,
    WorkerSpec,
    wait_for_start,
)
from engine.executor.channel import Channel
from engine.executor.metadata import Metadata, type_name, why_not
from engine.executor.wire import FromWorker, ToWorker, WorkerStart, error_of, pack_step
from engine.memory import CacheSizes
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]
_READER_TIMEOUT_S = 2.0


class MultiprocessExecutor(Executor):
    """Orders are encoded on the engine's thread; a thread, `worker-reader`, takes answers and settles their futures.
    `notify` is passed on from the connectors in the worker's process, and called when that process ends."""

    def __init__(
        self, spec: WorkerSpec, ec: type[Metadata], kv: type[Metadata] | None, notify: Callable[[], None]
    ) -> None:
        """`ec` and `kv` are the classes of metadata that the connectors' scheduler sides build. Raises ConfigError
        where they cannot cross to another process, EngineError where none can be started."""
        _check_crosses(spec.config.ec_connector, "--ec-connector", ec)
        _check_crosses(spec.config.kv_connector, "--kv-connector", kv)
        self._start = WorkerStart(spec, [type_name(cls) for cls in (ec, kv) if cls is not None])
        self._notify = notify
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()  # of the two below
        self._pending: deque[Future[FromWorker]] = deque()
        self._error: EngineError | None = None
        self._closing = False
        self._process, end = _start_process()
        self._name = f"worker 0 (process {self._process.pid})"
        self._channel = Channel(end)
        self._reader = threading.Thread(target=self._read, name="worker-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the worker's process."""
        return self._process.pid

    def load_model(self) -> WorkerReport:
        report = wait_for_start(self._order(ToWorker(start=self._start))).report
        assert report is not None
        return report

    def initialize_caches(self, sizes: CacheSizes) -> Handshakes:
        handshakes = wait_for_start(self._order(ToWorker(sizes=sizes))).handshakes
        assert handshakes is not None
        return handshakes

    def execute_model(self, out: SchedulerOutput) -> Future[ModelRunnerOutput]:
        made: Future[ModelRunnerOutput] = Future()

        def settle(answer: Future[FromWorker]) -> None:
            error = answer.exception()
            if error is not None:
                made.set_exception(error)
                return
            result = answer.result().made
            assert result is not None
            made.set_result(result)

        self._order(ToWorker(step=pack_step(out))).add_done_callback(settle)
        return made

    def check_health(self) -> None:
        if self._error is not None:
            raise self._error

    def shutdown(self) -> None:
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(EngineError):
            self._channel.send(self._encode(ToWorker(shutdown=True)))
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end within %g s and is killed", self._name, STOP_TIMEOUT_S)
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._channel.close()
        self._reader.join(_READER_TIMEOUT_S)

    def _order(self, message: ToWorker) -> Future[FromWorker]:
        future: Future[FromWorker] = Future()
        with self._lock:
            if self._error is None:
                self._pending.append(future)
            else:
                future.set_exception(self._error)
                return future
        # Where this fails, the reader finds the channel closed and ends every pending future, with the better reason.
        with contextlib.suppress(EngineError):
            self._channel.send(self._encode(message))
        return future

    def _read(self) -> None:
        decode = msgspec.msgpack.Decoder(FromWorker).decode
        reason = ""
        try:
            while (message := self._channel.receive()) is not None:
                if not message:
                    self._notify()
                    continue
                answer = decode(message)
                with self._lock:
                    future = self._pending.popleft()
                if answer.problem is not None:
                    future.set_exception(error_of(answer.problem, self._name))
                else:
                    future.set_result(answer)
        except (msgspec.MsgspecError, EngineError, IndexError) as error:
            reason = f"sent what cannot be read: {error}"
            self._process.kill()
        self._gone(reason)

    def _gone(self, reason: str) -> None:
        self._channel.close()
        if not self._closing:
            try:
                code = self._process.wait(STOP_TIMEOUT_S)
                reason = reason or f"ended with code {code}"
            except subprocess.TimeoutExpired:
                self._process.kill()
                reason = reason or "does not answer"
        error = EngineError(f"{self._name} {reason or 'was shut down'}")
        with self._lock:
            self._error = error
            pending = list(self._pending)
            self._pending.clear()
        for future in pending:
            future.set_exception(error)
        self._notify()


def _check_crosses(connector: ConnectorConfig | None, option: str, metadata: type[Metadata] | None) -> None:
    if connector is not None and metadata is not None and (reason := why_not(metadata)):
        reason += "; with --distributed-executor-backend uni it need not"
        raise ConfigError(option, connector.name, reason)


def _start_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and our end of the channel to it."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    try:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "engine.executor.worker_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C in a terminal is for the engine
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        ours.close()
        raise EngineError(f"a worker's process cannot be started: {error.strerror}") from None
    finally:
        theirs.close()
    return process, ours
