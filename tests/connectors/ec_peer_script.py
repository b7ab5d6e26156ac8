"""Stand-ins for what the fault tests of ECPeerConnector need: an encoder that says what a test wants, a line that is
cut."""

from __future__ import annotations

import selectors
import socket
import threading
from typing import TypeVar

import torch
import xxhash
import zmq

from connectors.ec.peer_wire import (
    Chunk,
    Hello,
    Item,
    Open,
    Pull,
    Reply,
    Request,
    Source,
    Welcome,
    decode_request,
    encode,
)
from connectors.ec.store import CHUNK_BYTES
from tests.connectors.support import DEADLINE_S, NAMESPACE, key

Kind = TypeVar("Kind", bound=Request)

INSTANCE, TOKEN = "1" * 32, "2" * 32


class Scripted:
    """An encoder that says what a test wants it to say."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvtimeo = int(DEADLINE_S * 1000)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.source = str(Source(self.address, INSTANCE, TOKEN))
        self.peer = b""

    def expect(self, *kinds: type[Kind]) -> Kind:
        self.peer, frame = self.socket.recv_multipart()
        request = decode_request(frame)
        assert isinstance(request, kinds), request
        return request

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def reply(self, reply: Reply, *frames: bytes) -> None:
        self.say(encode(reply), *frames)

    def welcome(self) -> None:
        self.expect(Hello)
        self.reply(Welcome(1, NAMESPACE, INSTANCE))

    def open(self) -> Open:
        """Go through the handshake; the first request for an item."""
        self.welcome()
        return self.expect(Open)

    def chunk(self, pull: Pull, data: bytes) -> None:
        self.reply(Chunk(pull.sequence, pull.index), data)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class Parcel:
    """An item of `num_rows` x 6 float32, as an encoder would hand it out."""

    def __init__(self, num_rows: int) -> None:
        self.embeds = torch.randint(0, 256, (num_rows, 24), dtype=torch.uint8).view(torch.float32)
        raw = self.embeds.view(torch.uint8).numpy().tobytes()
        self.chunks = [raw[begin : begin + CHUNK_BYTES] for begin in range(0, len(raw), CHUNK_BYTES)]

    def item(self, sequence: int) -> Item:
        checksums = [xxhash.xxh3_128_digest(chunk) for chunk in self.chunks]
        return Item(sequence, key(1), "float32", (len(self.embeds), 6), checksums)


class Line:
    """A TCP line to `port` that is cut, once, after `cut_after` bytes came back over it; `num_lines` were made."""

    def __init__(self, port: int, cut_after: int) -> None:
        self._port = port
        self._cut_after: int | None = cut_after
        self.num_lines = 0
        self.num_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        with socket.create_connection(("127.0.0.1", self.port)):
            self._thread.join(DEADLINE_S)
        self._listener.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            pairs: dict[socket.socket, socket.socket] = {}
            fronts: set[socket.socket] = set()
            while not self._closing:
                for selected, _ in selector.select():
                    if selected.fileobj is self._listener:
                        front, _ = self._listener.accept()
                        back = socket.create_connection(("127.0.0.1", self._port))
                        pairs[front], pairs[back] = back, front
                        fronts.add(front)
                        for each in (front, back):
                            selector.register(each, selectors.EVENT_READ)
                        self.num_lines += 1
                        continue
                    near = selected.fileobj
                    assert isinstance(near, socket.socket)
                    if near not in pairs:
                        continue
                    data = near.recv(65536)
                    if near not in fronts:
                        self.num_bytes += len(data)
                    if data and not (self._cut_after and self.num_bytes >= self._cut_after):
                        pairs[near].sendall(data)
                        continue
                    if data:
                        self._cut_after = None
                    for each in (near, pairs.pop(near)):
                        pairs.pop(each, None)
                        selector.unregister(each)
                        each.close()
            for each in pairs:
                each.close()
