"""A TCP proxy that loses, damages and delays what passes through it. Real sockets, threads of its own."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable

#: What to do with a chunk of bytes on its way from the producer: the bytes to pass on, or None to cut the connection.
Mischief = Callable[[bytes], bytes | None]


class LossyProxy:
    """Passes everything to `port` on loopback; what comes back goes through `mischief`."""

    def __init__(self, port: int, mischief: Mischief) -> None:
        self._target = port
        self._mischief = mischief
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sockets = [self._listener, *self._sockets]
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                consumer, _ = self._listener.accept()
                producer = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            with self._lock:
                if self._closed:
                    consumer.close()
                    producer.close()
                    return
                self._sockets += [consumer, producer]
            self._start(self._copy, consumer, producer, None)
            self._start(self._copy, producer, consumer, self._mischief)

    def _copy(self, source: socket.socket, target: socket.socket, mischief: Mischief | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16 << 10):
                passed = data if mischief is None else mischief(data)
                if passed is None:
                    break
                target.sendall(passed)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def flip_a_bit(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)
