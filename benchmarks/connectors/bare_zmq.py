"""Bytes from one process to another over bare ZeroMQ on loopback, as well as it can be done.

A ROUTER sends views of its memory, a header and some frames a message, without a copy; a DEALER asks for a few
messages ahead, receives without a copy, and copies each frame to its place in a buffer: what any consumer has to do. No
checksum, no lease, no acknowledgement, and no thread besides ZeroMQ's own at each end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from benchmarks.connectors.children import Child

Bytes = npt.NDArray[np.uint8]

_HEADER = bytes(64)  # about as long as the connectors' own
_TIMEOUT_MS = 60_000


class Form(NamedTuple):
    """How an item is cut."""

    frame_bytes: int
    frames_per_message: int
    window: int  # messages asked for ahead


def serve(pipe: Pipe) -> None:
    """The sending process: says its port, sends what is asked for there, and ends with the pipe."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    pipe.send(router.bind_to_random_port("tcp://127.0.0.1"))
    threading.Thread(target=_send_for_ever, args=(router,), daemon=True).start()
    with contextlib.suppress(EOFError):
        pipe.recv()


def _send_for_ever(router: zmq.Socket[bytes]) -> None:
    data: Bytes = np.zeros(0, dtype=np.uint8)
    while True:
        peer, order = router.recv_multipart()
        first, end, frame_bytes = map(int, order.split())
        if not frame_bytes:
            data = np.full(end, 1, dtype=np.uint8)
            router.send_multipart([peer, b"ready"])
            continue
        frames = [
            memoryview(data[begin : min(begin + frame_bytes, end)].data) for begin in range(first, end, frame_bytes)
        ]
        router.send_multipart([peer, _HEADER, *frames], copy=False)


class BareZMQ:
    """The receiving end, of a `Child(serve)`. One thread."""

    def __init__(self, child: Child) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.rcvtimeo = _TIMEOUT_MS
        self._dealer.connect(f"tcp://127.0.0.1:{child.answer()}")

    def prepare(self, num_bytes: int) -> None:
        """Have the other process hold so many bytes, and touch them."""
        self._dealer.send(b"0 %d 0" % num_bytes)
        self._dealer.recv()

    def receive(self, buffer: Bytes, places: Sequence[int], form: Form) -> None:
        """Fill `buffer`, flat; frame n of the item goes to its frame `places[n]`. Raises zmq.Again after a minute."""
        frame_bytes = form.frame_bytes
        message_bytes = frame_bytes * form.frames_per_message
        orders = [
            b"%d %d %d" % (first, min(first + message_bytes, len(buffer)), frame_bytes)
            for first in range(0, len(buffer), message_bytes)
        ]
        for order in orders[: form.window]:
            self._dealer.send(order)
        number = 0
        for n in range(len(orders)):
            _header, *frames = self._dealer.recv_multipart(copy=False)
            for frame in frames:
                begin = places[number] * frame_bytes
                buffer[begin : begin + len(frame)] = np.frombuffer(frame.buffer, dtype=np.uint8)
                number += 1
            if n + form.window < len(orders):
                self._dealer.send(orders[n + form.window])

    def __enter__(self) -> BareZMQ:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dealer.close()
        self._context.term()
