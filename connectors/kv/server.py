"""The producer's end of KVPeerConnector: one thread that serves leased blocks to whoever shows their token.

Blocks go out without a copy where the cache is in host memory and they are large: ZeroMQ reads the rows themselves,
perhaps after the lease has ended. That is sound: the checksums in the header were taken before, so a row that changes
under way fails at the consumer, and a consumer acknowledges only what has arrived. It is the same where the consumer
reads them out of shared memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import zmq

from connectors.kv.base import KVLayout, KVLease
from connectors.kv.checksums import LeasedChecksums
from connectors.kv.frames import RowFrames
from connectors.kv.leases import LeaseTable, NoLease
from connectors.kv.rows import BlockRows, Bytes
from connectors.kv.segment import SharedSegment
from connectors.kv.wire import (
    WIRE_VERSION,
    Ack,
    Failed,
    Hello,
    Places,
    Pull,
    Refused,
    Release,
    Renew,
    Reply,
    Request,
    Rows,
    Welcome,
    check_layout,
    decode_request,
    encode,
)
from connectors.peer_messages import MAX_HEADER_BYTES, MalformedError
from connectors.waker import Waker
from connectors.zmq_link import bind_router
from core.errors import IncompatibleError

log = logging.getLogger(__name__)

#: A handle can reach a consumer, and the consumer us, before the engine's next step orders the lease here. A request
#: for a lease that nobody has heard of waits this long for it.
_UNKNOWN_LEASE_GRACE_S = 2.0
_MAX_PARKED = 1024
#: Messages served between two looks at the clock and at new orders.
_BATCH = 64
#: Messages that wait for one consumer; it asks for far fewer at a time.
_MAX_QUEUED = 64
#: Buffers kept for rows that are copied before they are sent; each is as large as a message.
_MAX_STAGED = 8


class _Staging:
    """Buffers for rows that are copied before they are sent. ZeroMQ holds each until it is out; fresh memory every time
    would cost more than the copy. The serving thread only."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Bytes, zmq.MessageTracker]] = []
        self._taken: Bytes | None = None

    def take(self, num_bytes: int) -> Bytes:
        """A buffer that nobody reads any more, or a new one."""
        for n, (buffer, tracker) in enumerate(self._buffers):
            if tracker.done:
                del self._buffers[n]
                if len(buffer) >= num_bytes:
                    self._taken = buffer
                    return buffer
                break  # grown with the messages, one at a time
        self._taken = np.empty(num_bytes, dtype=np.uint8)
        return self._taken

    @property
    def is_taken(self) -> bool:
        """Whether a buffer was taken for the message that is to be sent."""
        return self._taken is not None

    def sent(self, tracker: zmq.MessageTracker) -> None:
        """The buffer taken last is in this message."""
        if self._taken is not None and len(self._buffers) < _MAX_STAGED:
            self._buffers.append((self._taken, tracker))
        self._taken = None


class BlockServer:
    """Binds in the constructor (zmq.ZMQError where that fails), serves from `start` to `close`. `ended` is called, on
    the server's thread, when leases have ended."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        layout: KVLayout,
        leases: LeaseTable,
        ended: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._leases = leases
        self._ended = ended
        self._rows: BlockRows | None = None
        self._checksums: LeasedChecksums | None = None
        self._segment: SharedSegment | None = None
        self._staging = _Staging()
        self._frames = RowFrames()
        self._parked: deque[tuple[float, bytes, Pull | Ack | Release]] = deque()
        self._waker = Waker()
        self._closing = False
        self._thread: threading.Thread | None = None
        try:
            self._socket, self.port = bind_router(context, endpoint, MAX_HEADER_BYTES, _MAX_QUEUED)
        except zmq.ZMQError:
            self._waker.close()
            raise

    def start(self, rows: BlockRows, segment: SharedSegment | None) -> None:
        """Serve the rows of this cache, which may lie in `segment`, offered already."""
        self._rows = rows
        self._checksums = LeasedChecksums(rows, self._leases, None if segment is None else segment.board)
        self._segment = segment
        self._thread = threading.Thread(target=self._run, name="kv-server", daemon=True)
        self._thread.start()

    def expect(self, leases: Iterable[KVLease]) -> None:
        """There are new leases. Any thread, after `start`."""
        assert self._checksums is not None
        self._checksums.expect(leases)
        self._waker.wake()

    @property
    def is_behind(self) -> bool:
        """Whether checksums are still being taken ahead. Any thread."""
        return self._checksums is not None and self._checksums.is_behind

    def close(self, timeout_s: float) -> bool:
        """Stop, within `timeout_s`; False where the thread still runs then. Idempotent."""
        self._closing = True
        if self._thread is None:
            self._free()
            return True
        self._waker.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _free(self) -> None:
        self._socket.close()
        self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.reader, zmq.POLLIN)
        if self._segment is not None:
            poller.register(self._segment.listener, zmq.POLLIN)
        assert self._checksums is not None
        try:
            while not self._closing:
                ready = dict(poller.poll(0 if self.is_behind else self._poll_ms()))
                if self._waker.reader.fileno() in ready:
                    self._waker.drain()
                if self._leases.expire(time.monotonic()):
                    self._ended()
                if self._segment is not None and self._segment.listener.fileno() in ready:
                    self._segment.serve()
                self._serve_parked()
                self._serve_batch()
                self._checksums.work_ahead()
        finally:
            self._free()

    def _poll_ms(self) -> int | None:
        times = [self._parked[0][0]] if self._parked else []
        expiry_s = self._leases.next_expiry_s()
        if expiry_s is not None:
            times.append(expiry_s)
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _serve_batch(self) -> None:
        for _ in range(_BATCH):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise MalformedError(f"{len(frames)} frames")
                self._serve(identity, decode_request(frames[0]), may_park=True)
            except MalformedError as error:
                log.debug("a message that is not ours came to the KV port: %s", error)
            except Exception:  # one request must not take the others' server away
                log.exception("a request for KV blocks failed")

    def _serve_parked(self) -> None:
        now_s = time.monotonic()
        for _ in range(len(self._parked)):
            deadline_s, identity, request = self._parked.popleft()
            if now_s < deadline_s and self._leases.find(request.lease, request.token) is NoLease.UNKNOWN:
                self._parked.append((deadline_s, identity, request))
            else:
                self._serve(identity, request, may_park=False)

    def _serve(self, identity: bytes, request: Request, *, may_park: bool) -> None:
        if isinstance(request, Hello):
            self._reply(identity, self._greet(request))
            return
        found = self._leases.renew(request.lease, request.token, time.monotonic())
        if isinstance(request, Renew):
            return
        if may_park and self._parked and found is not NoLease.UNKNOWN:
            self._serve_parked()  # what was asked for first is answered first
        if found is NoLease.UNKNOWN and may_park and len(self._parked) < _MAX_PARKED:
            self._parked.append((time.monotonic() + _UNKNOWN_LEASE_GRACE_S, identity, request))
        elif isinstance(request, Pull):
            if isinstance(found, NoLease):
                self._reply(identity, Failed(request.sequence, found.value, found is NoLease.GIVEN_UP))
            else:
                self._send_rows(identity, request, found.block_ids)
        else:
            assert self._checksums is not None
            self._checksums.forget(request.token)
            if self._leases.end(request.lease, request.token):
                self._ended()

    def _greet(self, hello: Hello) -> Reply:
        try:
            check_layout(hello.version, self._layout, hello.layout)
        except IncompatibleError as error:
            return Refused(str(error)[:8000])
        return Welcome(WIRE_VERSION, self._layout)

    def _send_rows(self, identity: bytes, pull: Pull, leased: list[int]) -> None:
        assert self._rows is not None
        assert self._checksums is not None
        if pull.first + pull.count > len(leased):
            reason = f"blocks {pull.first} to {pull.first + pull.count} of a lease of {len(leased)}"
            self._reply(identity, Failed(pull.sequence, reason, given_up=False))
            return
        block_ids = leased[pull.first : pull.first + pull.count]
        if not pull.mapped:
            arrays = self._rows.gather(block_ids, self._staging.take)
            are_views = self._rows.on_host and not self._staging.is_taken
            frames = map(self._frames.of, arrays) if are_views else (array.reshape(-1).data for array in arrays)
            self._reply(identity, Rows(pull.sequence, self._checksums.take(pull, arrays)), *frames)
        elif self._segment is not None:
            checksums = self._checksums.take(pull, self._rows.views(block_ids))
            self._reply(identity, Places(pull.sequence, checksums, block_ids))
        else:
            self._reply(identity, Failed(pull.sequence, "the cache is not in shared memory", given_up=False))

    def _reply(self, identity: bytes, reply: Reply, *rows: zmq.Frame | memoryview) -> None:
        # A peer that has gone, or that asks for more than it takes away, loses the message; ROUTER sends never wait.
        frames = [identity, encode(reply), *rows]
        tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=self._staging.is_taken)
        if tracker is not None:
            self._staging.sent(tracker)
