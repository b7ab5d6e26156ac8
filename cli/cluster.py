"""Encoders, prefills, decodes and a router as processes on loopback: `triptych up`, the demo and the tests use it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import msgspec

from cli import reaper
from cli.process import Child
from core.ports import free_ports

#: What every process of a local cluster listens on.
HOST = "127.0.0.1"
_ROOT = Path(__file__).resolve().parent.parent
STAGES = ("encoder", "prefill", "decode")
_STORAGE_CONNECTOR = "ECSharedStorageConnector"


class ClusterError(Exception):
    """A process of the cluster ended, or was not ready in time. The message ends with the error that it gave, which is
    one line; where it gave none, with its last lines."""

    def __init__(self, child: Child, what: str) -> None:
        lines = child.tail()
        errors = [line for line in lines if line.startswith("error: ")]
        said = f": {errors[-1].removeprefix('error: ')}" if errors else "".join(f"\n  {line}" for line in lines)
        super().__init__(f"{child.name} {what}{said}")
        self.name = child.name
        #: Of the process; None where it still runs.
        self.exit_code = child.process.poll() if child.started else None


class StartAbandonedError(Exception):
    """The caller gave up on a cluster that was still starting."""


class LocalCluster:
    """A cluster of processes that this one owns. Use as a context manager, or call `start` and `stop`.

    `service_args` go to the three services, `encoder_args` … to one of them; an option that a service gets twice counts
    as given last. `--kv-…` options in `service_args` skip the encoders, which hold no KV cache and refuse them. Unless
    the options say otherwise, the encoder cache is a private temporary folder that lives as long as the cluster.

    Should this process die without `stop`, the children are ended all the same: see `cli.reaper`. One thread at a time.
    """

    #: The module that each stage is run from.
    modules: ClassVar[dict[str, str]] = {stage: f"services.{stage}" for stage in STAGES}

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        encoders: int = 1,
        prefills: int = 1,
        decodes: int = 1,
        service_args: Sequence[str] = (),
        encoder_args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        router_args: Sequence[str] = (),
        router_port: int = 0,
        http_port: int = 0,
        log_dir: str | os.PathLike[str] | None = None,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 30.0,
    ) -> None:
        self._counts = {"encoder": encoders, "prefill": prefills, "decode": decodes}
        self._common = [*(["--model", os.fspath(model)] if model is not None else []), *service_args]
        self._own = {"encoder": encoder_args, "prefill": prefill_args, "decode": decode_args}
        self._router_args = [f"--port={router_port}", f"--http-port={http_port}", *router_args]
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._give_up = threading.Event()
        self._folder: str | None = None
        self._reaper: subprocess.Popen[str] | None = None
        self._router: Child | None = None
        #: By stage, in the order of their numbers. `.grpc`, `.metrics`, `.process`, `.log_path` of each.
        self.workers: dict[str, list[Child]] = {}

    # -- what a user of the cluster reads --

    @property
    def router_process(self) -> Child:
        if self._router is None:
            raise RuntimeError("the cluster has not been started")
        return self._router

    @property
    def router(self) -> str:
        """HOST:PORT of the router's gRPC."""
        return self.router_process.addresses["grpc"]

    @property
    def http(self) -> str:
        """HOST:PORT of the router's HTTP."""
        return self.router_process.addresses["http"]

    @property
    def pids(self) -> dict[str, int]:
        """Process id by name: "encoder-0", …, "router"."""
        return {child.name: child.process.pid for child in self._children() if child.started}

    def dead(self) -> Child | None:
        """Some process that has ended, if one has."""
        return next((child for child in self._children() if child.started and child.process.poll() is not None), None)

    # -- life --

    def start(self, timeout_s: float | None = None, *, give_up: threading.Event | None = None) -> LocalCluster:
        """Start everything, the router last, and wait until all of it serves.

        Raises ClusterError where something ends or is not ready after `timeout_s` seconds, StartAbandonedError where
        `give_up` was set meanwhile; then everything is stopped.
        """
        self._give_up = give_up if give_up is not None else threading.Event()
        deadline = time.monotonic() + (timeout_s if timeout_s is not None else self._start_timeout_s)
        try:
            self._prepare()
            for worker in self._workers():
                self._launch(worker)
            for worker in self._workers():
                self._await_ready(worker, deadline)
            self._router = self._make_router()
            self._launch(self._router)
            self._await_ready(self._router, deadline)
        except BaseException:
            self.stop(timeout_s=5.0)
            raise
        return self

    def stop(self, timeout_s: float | None = None) -> None:
        """The router first, which drains; then the stages. What has not ended after `timeout_s` each is killed."""
        timeout_s = timeout_s if timeout_s is not None else self._stop_timeout_s
        for children in ([self._router] if self._router is not None else [], list(self._workers())):
            for child in children:
                child.terminate()
            deadline = time.monotonic() + timeout_s
            for child in children:
                child.wait_ended(deadline)
                if child.started:
                    self._tell_reaper(f"-{child.process.pid}")
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._reaper is not None:
            with contextlib.suppress(OSError):
                if self._reaper.stdin is not None:
                    self._reaper.stdin.close()
            self._reaper.wait()
            self._reaper = None

    def kill(self) -> None:
        """SIGKILL to everything, also from a signal handler. `stop` is still to be called, and is short then."""
        for child in self._children():
            child.kill_group()

    def restart(self, stage: str, index: int, timeout_s: float = 120.0) -> Child:
        """Stop one worker unless it has ended already, start it on the same ports, and wait until it serves.

        Raises ClusterError where it does not come back.
        """
        worker = self.workers[stage][index]
        worker.terminate()
        worker.wait_ended(time.monotonic() + self._stop_timeout_s)
        self._tell_reaper(f"-{worker.process.pid}")
        self._launch(worker)
        self._await_ready(worker, time.monotonic() + timeout_s)
        return worker

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- inside --

    def _workers(self) -> Iterable[Child]:
        for stage in STAGES:
            yield from self.workers.get(stage, ())

    def _children(self) -> list[Child]:
        return [*([self._router] if self._router is not None else []), *self._workers()]

    def _prepare(self) -> None:
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        self._reaper = subprocess.Popen(  # noqa: S603 - our own file, no shell
            [sys.executable, "-I", "-S", reaper.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self._folder = tempfile.mkdtemp(prefix="triptych-")
        self._tell_reaper(f"d{self._folder}")
        args = {stage: self._stage_args(stage) for stage in STAGES}
        if not _names_a_store([arg for those in args.values() for arg in those]):
            extra = msgspec.json.encode({"shared_storage_path": os.path.join(self._folder, "ec")}).decode()
            for those in args.values():
                those.append(f"--ec-connector-extra-config={extra}")
        ports = iter(free_ports(sum(self._counts.values()), HOST))
        self.workers = {
            stage: [self._make_worker(stage, i, next(ports), args[stage]) for i in range(count)]
            for stage, count in self._counts.items()
        }

    def _stage_args(self, stage: str) -> list[str]:
        common = _without_kv(self._common) if stage == "encoder" else self._common
        return [*common, *self._own[stage]]

    def _make_worker(self, stage: str, index: int, port: int, args: list[str]) -> Child:
        name = f"{stage}-{index}"
        fixed = [f"--host={HOST}", f"--port={port}", "--metrics-port=0", f"--where={name}"]
        return self._child(name, self.modules[stage], [*fixed, *args])

    def _make_router(self) -> Child:
        lists = [f"--{stage}={','.join(worker.grpc for worker in self.workers[stage])}" for stage in STAGES]
        return self._child("router", "router", [f"--host={HOST}", *lists, *self._router_args])

    def _child(self, name: str, module: str, args: list[str]) -> Child:
        log_path = self._log_dir / f"{name}.log" if self._log_dir is not None else None
        # -P: a folder named `core` where the user happens to stand must not hide ours. Connectors of the user's own are
        # still found there, behind everything else.
        argv = [sys.executable, "-P", "-m", module, "serve", *args]
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        return Child(name, argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, log_path=log_path)

    def _launch(self, child: Child) -> None:
        self._tell_reaper(f"+{child.start()}")

    def _await_ready(self, child: Child, deadline: float) -> None:
        while not child.wait_ready(min(deadline, time.monotonic() + 0.2)):
            if self._give_up.is_set():
                raise StartAbandonedError
            for other in self._children():
                code = other.process.poll() if other.started else None
                if code is not None:
                    raise ClusterError(other, f"ended with exit code {code} before everything was ready")
            if time.monotonic() > deadline:
                raise ClusterError(child, "was not ready in time")

    def _tell_reaper(self, line: str) -> None:
        # A reaper that somebody killed is no reason to fail; it is a last resort only.
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(OSError):
                self._reaper.stdin.write(line + "\n")
                self._reaper.stdin.flush()


def _without_kv(args: Sequence[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(args)
    for arg in rest:
        if not arg.startswith("--kv-"):
            kept.append(arg)
        elif "=" not in arg:
            next(rest, None)  # its value
    return kept


def _names_a_store(args: Sequence[str]) -> bool:
    """Whether the options, or the environment that the services inherit, say where the encoder cache is."""
    given: dict[str, str] = {}
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.startswith("--ec-"):
            given[name] = value if equals else (args[i + 1] if i + 1 < len(args) else "")
    for name in ("--ec-connector", "--ec-connector-module-path", "--ec-connector-extra-config", "--ec-transfer-config"):
        variable = "TRIPTYCH_" + name[2:].replace("-", "_").upper()
        if variable in os.environ:
            given.setdefault(name, os.environ[variable])
    if given.get("--ec-connector") == _STORAGE_CONNECTOR:
        del given["--ec-connector"]
    given.pop("--ec-role", None)
    return bool(given)
