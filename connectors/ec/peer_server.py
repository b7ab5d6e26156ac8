"""The producer's end of ECPeerConnector: one thread that hands out held items to whoever shows their token.

Chunks go out without a copy: ZeroMQ reads the item's own memory, which never changes, and keeps it alive even where the
item is evicted meanwhile.
"""

from __future__ import annotations

import hmac
import logging
import threading

import zmq

from connectors.ec.peer_memory import HeldItem, ItemMemory
from connectors.ec.peer_wire import (
    WIRE_VERSION,
    Answer,
    Ask,
    Chunk,
    Done,
    Failed,
    Found,
    Hello,
    Item,
    Open,
    Pull,
    Refused,
    Reply,
    Request,
    Welcome,
    decode_request,
    encode,
    token_of,
)
from connectors.peer_messages import MAX_HEADER_BYTES, MalformedError
from connectors.waker import Waker
from connectors.zmq_link import bind_router

log = logging.getLogger(__name__)

#: Chunks that wait for one slow consumer; it asks again for what was dropped.
_MAX_QUEUED = 64


class ItemServer:
    """Binds in the constructor (zmq.ZMQError where that fails) and serves until `close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        namespace: str,
        instance: str,
        secret: bytes,
        memory: ItemMemory,
    ) -> None:
        self._namespace = namespace
        self._instance = instance
        self._secret = secret
        self._memory = memory
        self._closing = False
        self._socket, self.port = bind_router(context, endpoint, MAX_HEADER_BYTES, _MAX_QUEUED)
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="ec-peer-server", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop, within `timeout_s`; False where the thread still runs then. Idempotent."""
        self._closing = True  # which is all that the waker is for: nobody drains it
        self._waker.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.reader, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll()
                self._serve_all()
        finally:
            self._socket.close()
            self._waker.close()

    def _serve_all(self) -> None:
        while not self._closing:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise MalformedError(f"{len(frames)} frames")
                self._serve(identity, decode_request(frames[0]))
            except MalformedError as error:
                log.debug("a message that is not ours came to the encoder cache's port: %s", error)
            except Exception:  # one request must not take the others' server away
                log.exception("a request for an item failed")

    def _serve(self, identity: bytes, request: Request) -> None:
        if isinstance(request, Hello):
            self._reply(identity, self._greet(request))
        elif isinstance(request, Ask):
            keys = [key for key, _ in request.items]
            held = self._memory.contains(keys)
            entitled = [self._entitles(key, token) for key, token in request.items]
            self._memory.asked([key for key, may in zip(keys, entitled, strict=True) if may])
            self._reply(identity, Found(request.sequence, [a and b for a, b in zip(held, entitled, strict=True)]))
        elif isinstance(request, Done):
            if self._entitles(request.key, request.token):
                self._memory.pulled(request.key)
        else:
            self._reply(identity, *self._serve_item(request))

    def _serve_item(self, request: Open | Pull) -> tuple[Answer, memoryview] | tuple[Answer]:
        if not self._entitles(request.key, request.token):
            return (Failed(request.sequence, "token refused"),)
        item = self._memory.find(request.key)
        if item is None:
            return (Failed(request.sequence, "item is not held any more"),)
        if isinstance(request, Open):
            return Item(request.sequence, item.key, item.dtype, item.shape, item.checksums), item.chunk(0)
        if request.index >= len(item.checksums):
            return (Failed(request.sequence, f"item has {len(item.checksums)} chunks, not {request.index + 1}"),)
        if request.again and self._is_damaged(item):
            return (Failed(request.sequence, "item was damaged in the encoder's memory"),)
        return Chunk(request.sequence, request.index), item.chunk(request.index)

    def _is_damaged(self, item: HeldItem) -> bool:
        damaged = item.damaged_chunk() is not None
        if damaged:
            self._memory.drop(item)
        return damaged

    def _greet(self, hello: Hello) -> Reply:
        if hello.version != WIRE_VERSION:
            return Refused(f"version of the peer protocol is {WIRE_VERSION}, not {hello.version}")
        if hello.namespace != self._namespace:
            return Refused(f"namespace is {self._namespace}, not {hello.namespace}")
        return Welcome(WIRE_VERSION, self._namespace, self._instance)

    def _entitles(self, key: str, token: str) -> bool:
        return hmac.compare_digest(token_of(self._secret, key), token)

    def _reply(self, identity: bytes, reply: Reply, *frames: memoryview) -> None:
        # A peer that has gone, or that asks for more than it takes away, loses the message; ROUTER sends never wait.
        self._socket.send_multipart([identity, encode(reply), *frames], zmq.NOBLOCK, copy=False)
