"""The consumer's end of KVPeerConnector: one thread that pulls blocks from any number of producers.

It also keeps leases alive: of the pulls under way, and of those that are expected (the engine has the handle, and no
room for the blocks yet).
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from connectors.connections import BrokenError, Connections
from connectors.kv.base import KVLayout, KVPull
from connectors.kv.connection import Connection, RefusedError, SilentError
from connectors.kv.rows import BlockRows
from connectors.kv.segment import SameHost
from connectors.kv.transfer import PullEnd, Transfer
from connectors.kv.wire import HandleParams, check_layout, decode_handle
from connectors.waker import Waker
from core.errors import TriptychError
from core.types import KVHandle

log = logging.getLogger(__name__)

#: Leases are renewed so many times in the time that they last.
_RENEWALS = 3


class _Kept:
    """A lease that is kept alive."""

    __slots__ = ("next_s", "params")

    def __init__(self, params: HandleParams, next_s: float) -> None:
        self.params = params
        self.next_s = next_s  # monotonic, of the next renewal


class Puller:
    """`order` and `close` from any thread; everything else happens on the puller's own. `ended` is called there once
    for each pull ordered, whatever happens, until `close`."""

    def __init__(
        self,
        connector: str,
        layout: KVLayout,
        rows: BlockRows,
        blocks_per_message: int,
        timeout_s: float,
        same_host: SameHost,
        ended: Callable[[PullEnd], None],
    ) -> None:
        self._connector = connector
        self._layout = layout
        self._rows = rows
        self._blocks_per_message = blocks_per_message
        self._timeout_s = timeout_s
        self._same_host = same_host
        self._report = ended
        # A handle is expected, a string cancels; append and popleft are atomic.
        self._orders: deque[tuple[str, KVHandle] | KVPull | str] = deque()
        self._transfers: dict[str, Transfer] = {}
        self._kept: dict[str, _Kept] = {}  # by request id, as are the transfers
        self._waiting: deque[Transfer] = deque()  # for a free place among the connections
        self._poller = select.poll()
        self._connections = Connections[Connection](self._poller)
        self._waker = Waker()
        self._poller.register(self._waker.reader, select.POLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-puller", daemon=True)
        self._thread.start()

    def order(self, expected: Iterable[tuple[str, KVHandle]], pulls: list[KVPull], cancels: list[str]) -> None:
        """Keep leases, begin pulls, then end those whose request ids are in `cancels`. What is under way already, or
        unknown, is left as it is."""
        before = len(self._orders)
        self._orders.extend(expected)
        self._orders.extend(pulls)
        self._orders.extend(cancels)
        if pulls or cancels or len(self._orders) > before:
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
                except Exception:  # without this thread no pull would ever end
                    log.exception("pulling KV blocks failed")
                    for connection in self._connections:
                        self._forget(connection)
                    self._waiting.clear()
                    for transfer in list(self._transfers.values()):
                        self._ended(transfer, "internal error of the consumer")
        finally:
            self._connections.close()
            self._waker.close()

    def _step(self) -> None:
        for connection in self._connections:
            connection.link.register(self._poller)
        ready = {descriptor for descriptor, _ in self._poller.poll(self._poll_ms())}
        if self._waker.reader.fileno() in ready:
            self._waker.drain()
        now_s = time.monotonic()
        for connection in self._connections:
            with self._guarded(connection):
                if connection.link.fileno() in ready:
                    connection.receive()
                connection.check_time(now_s)
        self._connections.remove_idle(now_s)
        # After the connections: one that broke while it was idle must not be given a new pull.
        self._take_orders()
        self._renew(now_s)
        for _ in range(len(self._waiting)):
            self._begin(self._waiting.popleft())

    def _poll_ms(self) -> int | None:
        times = self._connections.times_s()
        times += [kept.next_s for kept in self._kept.values()]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    # ---- orders ----

    def _take_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, KVPull):
                self._take_pull(order)
            elif isinstance(order, str):
                self._cancel(order)
            else:
                request_id, handle = order
                # A handle that cannot be used is reported when its pull is ordered.
                with contextlib.suppress(TriptychError):
                    self._kept.setdefault(request_id, _Kept(decode_handle(handle, self._connector), time.monotonic()))

    def _take_pull(self, pull: KVPull) -> None:
        if pull.request_id in self._transfers:
            return
        ordered_s = time.monotonic()
        try:
            params = decode_handle(pull.handle, self._connector)
            check_layout(params.version, self._layout, params.layout)
        except TriptychError as error:
            self._refuse(pull, str(error))
            return
        if len(pull.block_ids) > params.num_blocks:
            self._refuse(pull, f"{len(pull.block_ids)} blocks ordered of a handle of {params.num_blocks}")
            return
        if pull.block_ids and not 0 <= min(pull.block_ids) <= max(pull.block_ids) < self._rows.num_blocks:
            self._refuse(pull, "ordered into blocks that are not in the cache")
            return
        transfer = Transfer(pull, params, ordered_s)
        self._transfers[transfer.request_id] = transfer
        # Pieces renew as they are asked for; between them, and while it waits its turn, this does.
        self._kept.setdefault(transfer.request_id, _Kept(params, ordered_s + params.lease_s / _RENEWALS))
        self._begin(transfer)

    def _refuse(self, pull: KVPull, reason: str) -> None:
        self._kept.pop(pull.request_id, None)
        self._report(PullEnd(pull.request_id, reason))

    def _cancel(self, request_id: str) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is None:
            kept = self._kept.pop(request_id, None)
            if kept is not None:
                with contextlib.suppress(BrokenError):
                    connection = self._connect(kept.params.address)
                    if connection is not None:
                        with self._guarded(connection):
                            connection.release(kept.params)
        elif transfer in self._waiting:
            self._waiting.remove(transfer)
            self._ended(transfer, "cancelled")
        else:
            connection = self._connections.get(transfer.params.address)
            assert connection is not None
            with self._guarded(connection):
                connection.cancel(transfer)

    def _renew(self, now_s: float) -> None:
        for kept in list(self._kept.values()):
            if now_s < kept.next_s:
                continue
            kept.next_s = now_s + kept.params.lease_s / _RENEWALS
            # A producer that cannot be reached fails the pull when that is ordered, not before.
            with contextlib.suppress(BrokenError):
                connection = self._connect(kept.params.address)
                if connection is not None:
                    with self._guarded(connection):
                        connection.renew(kept.params)

    # ---- transfers ----

    def _begin(self, transfer: Transfer) -> None:
        try:
            connection = self._connect(transfer.params.address)
        except BrokenError as error:
            self._ended(transfer, str(error))
            return
        if connection is None:
            self._waiting.append(transfer)
            return
        with self._guarded(connection):
            connection.add(transfer)

    def _ended(self, transfer: Transfer, reason: str | None) -> None:
        del self._transfers[transfer.request_id]
        self._kept.pop(transfer.request_id, None)
        self._report(
            PullEnd(
                transfer.request_id,
                reason,
                given_up=transfer.given_up,
                num_bytes=transfer.num_received * self._rows.row_bytes,
                seconds=time.monotonic() - transfer.ordered_s,
                road=transfer.road,
                num_retries=transfer.num_retries,
            )
        )

    # ---- connections ----

    def _connect(self, address: str) -> Connection | None:
        """The connection to a producer. None where there are too many and none is idle; raises BrokenError."""
        connection = self._connections.get(address)
        if connection is not None:
            return connection
        if not self._connections.has_room():
            return None
        connection = Connection(
            address,
            self._layout,
            self._rows,
            self._blocks_per_message,
            self._timeout_s,
            self._same_host,
            self._ended,
        )
        self._connections.add(connection)
        return connection

    @contextlib.contextmanager
    def _guarded(self, connection: Connection) -> Iterator[None]:
        """Use a connection; where it turns out to be broken, its transfers go on over another one, or fail."""
        try:
            yield
        except RefusedError as error:
            for transfer in self._forget(connection):
                self._ended(transfer, str(error))
        except BrokenError as error:
            self._replace(connection, error)

    def _replace(self, broken: Connection, error: BrokenError) -> None:
        transfers = self._forget(broken)
        if transfers:
            log.warning("KV pulls are disturbed: %s", error)
        silent = isinstance(error, SilentError)
        for transfer in transfers:
            before = transfer.problem
            if not (silent or error.was_up):
                # Nobody listens there: the process has gone, and what it held has gone with it.
                self._ended(transfer, f"{before}, then {error}" if before else str(error))
            elif transfer.survive(str(error), silent=silent):
                self._begin(transfer)
            elif silent:
                self._ended(transfer, f"{broken.address} sent nothing for {self._timeout_s:g} s")
            else:
                self._ended(transfer, str(error))

    def _forget(self, connection: Connection) -> list[Transfer]:
        transfers = connection.detach()
        self._connections.remove(connection)
        return transfers
