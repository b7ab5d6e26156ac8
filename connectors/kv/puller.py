"""The consumer's end of KVPeerConnector: one thread that pulls blocks from any number of producers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from connectors.kv.base import KVLayout, KVPull
from connectors.kv.connection import BrokenError, Connection, Transfer
from connectors.kv.rows import BlockRows
from connectors.kv.waker import Waker
from connectors.kv.wire import MAX_BLOCKS_PER_MESSAGE, check_layout, decode_handle
from core.errors import TriptychError

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_IDLE_CLOSE_S = 60.0
#: A message is checked and copied in one go, while nothing else is received: let it be no longer than a few
#: milliseconds.
_MAX_MESSAGE_BYTES = 16 << 20

#: (request id, reason or None, bytes received, seconds)
Ended = Callable[[str, str | None, int, float], None]


class Puller:
    """`order` and `close` from any thread; everything else happens on the puller's own. `ended` is called there once
    for each pull ordered, whatever happens, until `close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connector: str,
        layout: KVLayout,
        rows: BlockRows,
        blocks_per_message: int,
        timeout_s: float,
        ended: Ended,
    ) -> None:
        self._context = context
        self._connector = connector
        self._layout = layout
        self._rows = rows
        self._blocks_per_message = max(
            1, min(blocks_per_message, MAX_BLOCKS_PER_MESSAGE, _MAX_MESSAGE_BYTES // max(1, rows.row_bytes))
        )
        self._timeout_s = timeout_s
        self._report = ended
        self._orders: deque[KVPull | str] = deque()  # a string cancels; append and popleft are atomic
        self._transfers: dict[str, Transfer] = {}
        self._connections: dict[str, Connection] = {}
        self._waiting: deque[Transfer] = deque()  # for a free place among the connections
        self._poller = zmq.Poller()
        self._waker = Waker()
        self._poller.register(self._waker.reader, zmq.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-puller", daemon=True)
        self._thread.start()

    def order(self, pulls: list[KVPull], cancels: list[str]) -> None:
        """Begin pulls, then end those whose request ids are in `cancels`. What is under way already, or unknown, is
        left as it is."""
        self._orders.extend(pulls)
        self._orders.extend(cancels)
        if pulls or cancels:
            self._waker.wake()

    def close(self, timeout_s: float) -> bool:
        """Stop, within `timeout_s`; False where the thread still runs then. Idempotent."""
        self._closing = True
        self._waker.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._step()
                except Exception:
                    log.exception("pulling KV blocks failed")
                    for connection in list(self._connections.values()):
                        self._drop(connection, "internal error of the consumer")
        finally:
            for connection in self._connections.values():
                connection.close()
            self._waker.close()

    def _step(self) -> None:
        ready = dict(self._poller.poll(self._poll_ms()))
        self._waker.drain()
        now_s = time.monotonic()
        for connection in list(self._connections.values()):
            try:
                if connection.socket in ready or connection.monitor in ready:
                    connection.receive()
                    connection.check_monitor()
                connection.check_deadline(now_s)
            except BrokenError as error:
                self._drop(connection, str(error))
        self._close_idle(now_s)
        # After the connections: one that broke while it was idle must not be given a new pull.
        self._take_orders()
        for _ in range(len(self._waiting)):
            self._begin(self._waiting.popleft())

    def _poll_ms(self) -> int | None:
        times = [
            c.last_progress_s + _IDLE_CLOSE_S if c.deadline_s is None else c.deadline_s
            for c in self._connections.values()
        ]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _take_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, KVPull):
                self._take_pull(order)
            else:
                self._cancel(order)

    def _take_pull(self, pull: KVPull) -> None:
        if pull.request_id in self._transfers:
            return
        ordered_s = time.monotonic()
        try:
            params = decode_handle(pull.handle, self._connector)
            check_layout(params.version, self._layout, params.layout)
        except TriptychError as error:
            self._report(pull.request_id, str(error), 0, 0.0)
            return
        reason = None
        if len(pull.block_ids) > params.num_blocks:
            reason = f"{len(pull.block_ids)} blocks ordered of a handle of {params.num_blocks}"
        elif pull.block_ids and not 0 <= min(pull.block_ids) <= max(pull.block_ids) < self._rows.num_blocks:
            reason = "ordered into blocks that are not in the cache"
        if reason is not None:
            self._report(pull.request_id, reason, 0, 0.0)
            return
        transfer = Transfer(pull, params, ordered_s)
        self._transfers[transfer.request_id] = transfer
        self._begin(transfer)

    def _begin(self, transfer: Transfer) -> None:
        address = transfer.params.address
        connection = self._connections.get(address)
        try:
            if connection is None:
                if len(self._connections) >= _MAX_CONNECTIONS and not self._make_room():
                    self._waiting.append(transfer)
                    return
                connection = Connection(
                    self._context,
                    address,
                    self._layout,
                    self._rows,
                    self._blocks_per_message,
                    self._timeout_s,
                    self._ended,
                )
                self._connections[address] = connection
                self._poller.register(connection.socket, zmq.POLLIN)
                self._poller.register(connection.monitor, zmq.POLLIN)
            connection.add(transfer)
        except BrokenError as error:
            if connection is None:
                self._ended(transfer, str(error))
            else:
                self._drop(connection, str(error))

    def _cancel(self, request_id: str) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        if transfer in self._waiting:
            self._waiting.remove(transfer)
            self._ended(transfer, "cancelled")
            return
        connection = self._connections[transfer.params.address]
        try:
            connection.cancel(transfer)
        except BrokenError as error:
            self._drop(connection, str(error))

    def _ended(self, transfer: Transfer, reason: str | None) -> None:
        del self._transfers[transfer.request_id]
        num_bytes = transfer.num_received * self._rows.row_bytes
        self._report(transfer.request_id, reason, num_bytes, time.monotonic() - transfer.ordered_s)

    def _make_room(self) -> bool:
        idle = [connection for connection in self._connections.values() if connection.idle]
        if idle:
            self._drop(min(idle, key=lambda connection: connection.last_progress_s), "")
        return bool(idle)

    def _close_idle(self, now_s: float) -> None:
        for connection in list(self._connections.values()):
            if connection.idle and now_s >= connection.last_progress_s + _IDLE_CLOSE_S:
                self._drop(connection, "")

    def _drop(self, connection: Connection, reason: str) -> None:
        if reason and not connection.idle:
            log.warning("KV pulls fail: %s", reason)
        self._connections.pop(connection.address, None)
        self._poller.unregister(connection.socket)
        self._poller.unregister(connection.monitor)
        connection.fail_all(reason)
        connection.close()
