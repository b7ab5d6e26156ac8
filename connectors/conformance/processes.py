"""The fork server as its clients see it: starting it, and processes of its own making."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from connectors.conformance.channel import Channel, ChannelError

_START_S = 120.0
_REQUEST_S = 10.0


class ForkServer:
    """Runs `connectors.conformance.fork_server`. A context manager; at its end nothing of it is left running."""

    def __init__(self, connector: str, *, log_path: Path | None = None) -> None:
        self._connector = connector
        self._log_path = log_path
        self._folder = tempfile.TemporaryDirectory(prefix="triptych-kit-")
        self.path = str(Path(self._folder.name) / "fork")

    def __enter__(self) -> ForkServer:
        """Raises ChannelError where it does not start."""
        # One thread each: the processes are many, and a process with threads cannot be forked safely.
        env = dict(os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
        env["PYTHONPATH"] = os.pathsep.join(path or os.curdir for path in sys.path)
        with contextlib.ExitStack() as files:
            log = files.enter_context(self._log_path.open("ab")) if self._log_path else subprocess.DEVNULL
            self._process = subprocess.Popen(  # noqa: S603 - a list of our own making, no shell
                [sys.executable, "-m", "connectors.conformance.fork_server", self.path, self._connector],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            if not ready.select(_START_S) or not self._process.stdout.readline():
                self.__exit__(None, None, None)
                raise ChannelError("the kit's processes cannot be started; the log has more")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its whole session, also what a connector started there
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._folder.cleanup()


def fork(path: str, role: str, **request: Any) -> tuple[int, Channel]:
    """A new process of the server at `path`: its id, and the channel to it. Raises ChannelError."""
    channel = Channel.connect(path, _REQUEST_S)
    try:
        channel.send(role=role, **request)
        return int(channel.receive(_REQUEST_S)["pid"]), channel
    except BaseException:
        channel.close()
        raise


def kill(pid: int, channel: Channel) -> None:
    """SIGKILL to a process of the server's, and wait until it is gone. Closes the channel."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChannelError):
        while "exit" not in channel.receive(_REQUEST_S):
            pass
    channel.close()
