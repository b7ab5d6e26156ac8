"""A process that has imported everything, runs no threads, and forks a fresh process for whoever connects.

Each check runs in a process of its own, so that a connector that crashes, hangs or leaks spoils one check alone, and
some checks need a dozen processes more. Importing torch for each of them would take longer than the whole kit does.

    python -m connectors.conformance.fork_server SOCKET [CONNECTOR]

Standard input is the life line: when it closes, all children are killed and the server ends. Over each connection goes
first `{"pid": …}`, then whatever the child and its client have to say, and at last `{"exit": status}`, the status in
`os.waitstatus_to_exitcode`'s terms.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import torch

from connectors.conformance.channel import Channel, ChannelError
from connectors.conformance.check_process import serve_check
from connectors.conformance.engine_process import serve_engine
from connectors.conformance.factory import ConnectorFactory
from connectors.conformance.kv_engine import serve_kv_producer
from core.errors import ConfigError

#: What a client may have run: each takes the channel, the server's own path and the rest of the request.
_ROLES: dict[str, Callable[..., None]] = {
    "check": serve_check,
    "engine": serve_engine,
    "kv_producer": serve_kv_producer,
}
_REQUEST_S = 10.0
_NO_IMPORT = "--import-nothing"


def main() -> None:
    path, connector, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    if not flags:
        with contextlib.suppress(ConfigError):  # for a check to find
            ConnectorFactory.from_text(connector).find_class()
        if len(os.listdir("/proc/self/task")) > 1:  # an import started threads: each process must import it for itself
            command = [sys.executable, "-m", "connectors.conformance.fork_server", path, connector, _NO_IMPORT]
            os.execv(sys.executable, command)  # noqa: S606 - no shell is what is wanted
    _serve(path)


def _serve(path: str) -> None:
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, selectors.DefaultSelector() as ready:
        listener.bind(path)
        listener.listen(64)
        for file in (listener, wake, sys.stdin):
            ready.register(file, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            files = [key.fileobj for key, _ in ready.select()]
            if sys.stdin in files:
                os.killpg(0, signal.SIGKILL)
            if wake in files:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 1 << 12)
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    _send_exit(children.pop(pid), os.waitstatus_to_exitcode(status))
            if listener in files:
                connection, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    ready.close()
                    listener.close()
                    for other in children.values():
                        other.close()
                    _be_child(connection, path, (wake, woken))
                children[pid] = connection


def _send_exit(connection: socket.socket, status: int) -> None:
    with contextlib.suppress(OSError, ChannelError):
        Channel(connection).send(exit=status)
    connection.close()


def _be_child(connection: socket.socket, path: str, pipe: tuple[int, int]) -> None:
    """The forked process's whole life. Never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in pipe:
            os.close(descriptor)
        channel = Channel(connection)
        channel.send(pid=os.getpid())
        request = channel.receive(_REQUEST_S)
        _ROLES[request.pop("role")](channel, path, **request)
        status = 0
    except ChannelError:
        pass  # the client has gone: nobody is left to tell
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # not the interpreter's own end, which would wait for a connector's threads


if __name__ == "__main__":
    main()
