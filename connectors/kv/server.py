"""The producer's end of KVPeerConnector: one thread that serves leased blocks to whoever shows their token.

Blocks go out without a copy where the cache is in host memory: the kernel reads the rows themselves, perhaps after the
lease has ended. That is sound: the checksums in the header were taken before, so a row that changes under way fails at
the consumer, and a consumer acknowledges only what has arrived. It is the same where the consumer reads them out of
shared memory.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from connectors.kv.base import KVLayout, KVLease
from connectors.kv.checksums import LeasedChecksums
from connectors.kv.consumers import Consumer, Consumers
from connectors.kv.leases import LeaseTable, NoLease
from connectors.kv.rows import BlockRows
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
from connectors.peer_messages import MalformedError
from connectors.waker import Waker
from core.errors import IncompatibleError

log = logging.getLogger(__name__)

#: A handle can reach a consumer, and the consumer us, before the engine's next step orders the lease here. A request
#: for a lease that nobody has heard of waits this long for it.
_UNKNOWN_LEASE_GRACE_S = 2.0
_MAX_PARKED = 1024
#: Of them, pulls of one consumer. One of ours asks for a few at a time.
_MAX_PARKED_PULLS = 16


class BlockServer:
    """Binds in the constructor (OSError where that fails), serves from `start` to `close`. `ended` is called, on
    the server's thread, when leases have ended."""

    def __init__(
        self,
        host: str,
        port: int,
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
        self._parked: deque[tuple[float, Consumer, Pull | Ack | Release]] = deque()
        self._consumers = Consumers(host, port)
        self._waker = Waker()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return self._consumers.port

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
        self._consumers.close()
        self._waker.close()

    def _run(self) -> None:
        poller = select.poll()
        self._consumers.register(poller)
        poller.register(self._waker.reader, select.POLLIN)
        if self._segment is not None:
            self._segment.listener.register(poller)
        assert self._checksums is not None
        try:
            while not self._closing:
                ready = {descriptor for descriptor, _ in poller.poll(0 if self.is_behind else self._poll_ms())}
                if self._waker.reader.fileno() in ready:
                    self._waker.drain()
                if self._leases.expire(time.monotonic()):
                    self._ended()
                if self._segment is not None:
                    self._segment.serve(ready)
                self._serve_parked()
                for consumer, header in self._consumers.messages(ready):
                    self._serve_message(consumer, header)
                self._checksums.work_ahead()
        finally:
            self._free()

    def _poll_ms(self) -> int | None:
        known_s = [self._leases.next_expiry_s(), self._consumers.deadline_s]
        if self._segment is not None:
            known_s.append(self._segment.listener.deadline_s)
        if self._parked:
            known_s.append(self._parked[0][0])
        times = [time_s for time_s in known_s if time_s is not None]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _serve_message(self, consumer: Consumer, header: bytes) -> None:
        try:
            request = decode_request(header)
        except MalformedError as error:
            log.debug("a message that is not ours came to the KV port: %s", error)
            return
        consumer.is_ours = True
        if isinstance(request, Pull) and consumer.is_gone:
            return
        if isinstance(request, Pull) and consumer.stream.num_waiting:
            self._leases.renew(request.lease, request.token, time.monotonic())
            consumer.aside.append(header)
        else:
            self._serve(consumer, request, may_park=True)

    def _serve_parked(self) -> None:
        now_s = time.monotonic()
        for _ in range(len(self._parked)):
            deadline_s, consumer, request = self._parked.popleft()
            if isinstance(request, Pull) and consumer.is_gone:
                continue
            if now_s < deadline_s and self._leases.find(request.lease, request.token) is NoLease.UNKNOWN:
                self._parked.append((deadline_s, consumer, request))
            else:
                consumer.num_parked -= isinstance(request, Pull)
                self._serve(consumer, request, may_park=False)

    def _serve(self, consumer: Consumer, request: Request, *, may_park: bool) -> None:
        try:
            if isinstance(request, Hello):
                self._reply(consumer, self._greet(request))
            else:
                self._serve_lease(consumer, request, may_park=may_park)
        except Exception:  # one request must not take the others' server away
            log.exception("a request for KV blocks failed")
            if isinstance(request, Pull):
                self._reply(consumer, Failed(request.sequence, "internal error of the producer", given_up=False))

    def _serve_lease(self, consumer: Consumer, request: Renew | Pull | Ack | Release, *, may_park: bool) -> None:
        found = self._leases.renew(request.lease, request.token, time.monotonic())
        if isinstance(request, Renew):
            return
        if may_park and self._parked and found is not NoLease.UNKNOWN:
            self._serve_parked()  # what was asked for first is answered first
        if found is NoLease.UNKNOWN and may_park and self._has_place(consumer, request):
            consumer.num_parked += isinstance(request, Pull)
            self._parked.append((time.monotonic() + _UNKNOWN_LEASE_GRACE_S, consumer, request))
        elif isinstance(request, Pull):
            if isinstance(found, NoLease):
                self._reply(consumer, Failed(request.sequence, found.value, found is NoLease.GIVEN_UP))
            else:
                self._send_rows(consumer, request, found.block_ids)
        else:
            assert self._checksums is not None
            self._checksums.forget(request.token)
            if self._leases.end(request.lease, request.token):
                self._ended()

    def _has_place(self, consumer: Consumer, request: Pull | Ack | Release) -> bool:
        is_one_of_many = isinstance(request, Pull) and consumer.num_parked >= _MAX_PARKED_PULLS
        return len(self._parked) < _MAX_PARKED and not is_one_of_many

    def _greet(self, hello: Hello) -> Reply:
        try:
            check_layout(hello.version, self._layout, hello.layout)
        except IncompatibleError as error:
            return Refused(str(error)[:8000])
        return Welcome(WIRE_VERSION, self._layout)

    def _send_rows(self, consumer: Consumer, pull: Pull, leased: list[int]) -> None:
        assert self._rows is not None
        assert self._checksums is not None
        if pull.first + pull.count > len(leased):
            reason = f"blocks {pull.first} to {pull.first + pull.count} of a lease of {len(leased)}"
            self._reply(consumer, Failed(pull.sequence, reason, given_up=False))
            return
        if pull.mapped and self._segment is None:
            self._reply(consumer, Failed(pull.sequence, "the cache is not in shared memory", given_up=False))
            return
        block_ids = leased[pull.first : pull.first + pull.count]
        rows = self._rows.read(block_ids)
        checksums = self._checksums.take(pull, block_ids, rows)
        if pull.mapped:
            self._reply(consumer, Places(pull.sequence, checksums, block_ids))
        else:
            self._reply(consumer, Rows(pull.sequence, checksums), [row.reshape(-1).data for row in rows])

    def _reply(self, consumer: Consumer, reply: Reply, body: Iterable[memoryview] = ()) -> None:
        self._consumers.send(consumer, encode(reply), body)
