"""The consumer's end of ECPeerConnector: one thread that asks any number of producers for items, and pulls them."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import zmq

from connectors.breaker import CircuitBreaker
from connectors.connections import BrokenError, Connections
from connectors.ec.peer_connection import PeerConnection
from connectors.ec.peer_orders import Order
from connectors.waker import Waker

log = logging.getLogger(__name__)

_MAX_BREAKERS = 1024
#: How often an order goes on over a new connection after its own broke.
_MAX_MOVES = 2


class PeerClient:
    """`order` and `close` from any thread; everything else is on the client's own. `ended` is called there once
    for each order, whatever happens, by its deadline, until `close`: `reason` is None where the peer answered. The
    deadlines of orders must not become earlier from one to the next.

    A peer that fails `breaker_failures` times in a row is left alone for `breaker_cooldown_s`: orders to it fail at
    once. A peer that says nothing for a part of `limit_s`, an order's time, though something is awaited has failed.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        namespace: str,
        *,
        limit_s: float,
        breaker_failures: int,
        breaker_cooldown_s: float,
        ended: Callable[[Order], None],
    ) -> None:
        self._context = context
        self._namespace = namespace
        self._limit_s = limit_s
        self._breaker_failures = breaker_failures
        self._breaker_cooldown_s = breaker_cooldown_s
        self._report = ended
        self._lock = threading.Lock()
        self._num_opens = 0
        self._orders: deque[Order] = deque()  # new ones; append and popleft are atomic
        self._under_way: deque[Order] = deque()  # in the order of their deadlines
        self._waiting: deque[Order] = deque()  # for a free place among the connections
        self._breakers: OrderedDict[str, CircuitBreaker] = OrderedDict()
        self._poller = zmq.Poller()
        self._connections = Connections[PeerConnection](self._poller)
        self._waker = Waker()
        self._poller.register(self._waker.reader, zmq.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ec-peer-client", daemon=True)
        self._thread.start()

    def order(self, order: Order) -> None:
        """Begin."""
        self._orders.append(order)
        self._waker.wake()

    def take_opens(self) -> int:
        """How often a peer began to be left alone since the last call."""
        with self._lock:
            opens, self._num_opens = self._num_opens, 0
        return opens

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
                except Exception:  # without this thread no order would ever end
                    log.exception("pulling items from encoders failed")
                    for connection in self._connections:
                        self._drop(connection, BrokenError("internal error of the consumer"))
        finally:
            self._connections.close()
            self._waker.close()

    def _step(self) -> None:
        ready = dict(self._poller.poll(self._poll_ms()))
        if self._waker.reader.fileno() in ready:
            self._waker.drain()
        now_s = time.monotonic()
        for connection in self._connections:
            try:
                if connection.link.socket in ready:
                    connection.receive()
                elif connection.link.monitor in ready:  # only once all that had come was taken
                    connection.link.check()
                connection.check_deadline(now_s)
            except BrokenError as error:
                self._drop(connection, error)
            self._take_ended(connection)
        self._expire(now_s)
        self._connections.remove_idle(now_s)
        # After the connections: one that broke while it was idle must not be given a new order.
        new = [self._orders.popleft() for _ in range(len(self._orders))]
        self._under_way.extend(new)
        again = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._begin_all([*again, *new])

    def _poll_ms(self) -> int | None:
        if self._orders or (self._waiting and not self._connections.are_full):
            return 0
        times = self._connections.times_s()
        while self._under_way and self._under_way[0].over:
            self._under_way.popleft()
        if self._under_way:
            times.append(self._under_way[0].deadline_s)
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _begin_all(self, orders: list[Order]) -> None:
        touched: dict[str, PeerConnection] = {}
        for order in orders:
            if order.over:
                continue
            try:
                connection = self._connection_to(order)
            except BrokenError as error:
                self._end(order, str(error))
                continue
            if connection is None:
                self._waiting.append(order)
                continue
            connection.add(order)
            touched[connection.address] = connection
        for connection in touched.values():
            try:
                connection.pump()
            except BrokenError as error:
                self._drop(connection, error)
            self._take_ended(connection)

    def _connection_to(self, order: Order) -> PeerConnection | None:
        """None where there is no room for another one. Raises BrokenError where the peer is left alone."""
        address = order.source.address
        connection = self._connections.get(address)
        if connection is not None:
            return connection
        if not self._connections.has_room():
            return None
        breaker = self._breaker_of(address)
        if not breaker.allow():
            raise BrokenError(f"{address} does not answer; it is left alone for a moment")
        try:
            connection = PeerConnection(self._context, address, self._namespace, self._limit_s)
        except BrokenError:
            self._note_failure(address)
            raise
        self._connections.add(connection)
        return connection

    def _breaker_of(self, address: str) -> CircuitBreaker:
        breaker = self._breakers.get(address)
        if breaker is None:
            breaker = self._breakers[address] = CircuitBreaker(self._breaker_failures, self._breaker_cooldown_s)
            if len(self._breakers) > _MAX_BREAKERS:
                self._breakers.popitem(last=False)
        self._breakers.move_to_end(address)
        return breaker

    def _note_failure(self, address: str) -> None:
        breaker = self._breaker_of(address)
        breaker.failed()
        opens = breaker.take_opens()
        with self._lock:
            self._num_opens += opens

    def _take_ended(self, connection: PeerConnection) -> None:
        if connection.has_answered:
            connection.has_answered = False
            self._breaker_of(connection.address).succeeded()
        ended, connection.ended = connection.ended, []
        for order in ended:
            self._report(order)

    def _end(self, order: Order, reason: str) -> None:
        if order.over:
            return
        connection = self._connections.get(order.source.address)
        if connection is not None:
            connection.drop(order)
        order.over = True
        order.reason = reason
        self._report(order)

    def _expire(self, now_s: float) -> None:
        while self._under_way and (self._under_way[0].over or self._under_way[0].deadline_s <= now_s):
            order = self._under_way.popleft()
            if not order.over:
                self._end(order, f"{order.source.address} took too long")

    def _drop(self, connection: PeerConnection, error: BrokenError) -> None:
        """It broke. What was under way goes on over a new one if that may help, and fails if not."""
        was_idle = connection.idle and connection.is_up
        self._take_ended(connection)
        orders = connection.take_orders()
        self._connections.remove(connection)
        if was_idle:
            return
        self._note_failure(connection.address)
        log.warning("an encoder's memory cannot be reached: %s", error)
        for order in orders:
            order.num_moves += 1
            if error.was_up and order.num_moves <= _MAX_MOVES:
                self._waiting.append(order)
            else:
                self._end(order, str(error))
