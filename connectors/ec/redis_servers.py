"""Which Redis server is in charge of a key: the only one, the master that Sentinel names, or the slot's in a cluster.

The three differ in how they learn it. What they know is forgotten (`forget`) when a server answers that another one is
in charge, or does not answer, and is learnt again by the next caller. Any thread.
"""

from __future__ import annotations

import functools
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, TypeVar

from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot

from connectors.ec.redis_errors import ServerError, UnreachableError
from connectors.ec.redis_link import Link, LinkPool
from connectors.ec.redis_url import Address, Login, RedisLocation
from connectors.ec.store import StoreError

#: Longest wait for a connection. Less than `close` has: a thread that is connecting cannot be woken.
_CONNECT_S = 1.5
_NUM_SLOTS = 16384

T = TypeVar("T")
_Range = tuple[int, int, Address]  # first and last hash slot, and who is in charge of them


class TlsConnection(SSLConnection):
    """redis-py's, with a context made and checked once, and with a limit on the handshake."""

    def __init__(self, *, tls: ssl.SSLContext, **given: Any) -> None:
        super().__init__(**given)
        self._tls = tls

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        sock.settimeout(self.socket_connect_timeout)
        wrapped = self._tls.wrap_socket(sock, server_hostname=self.host)
        wrapped.settimeout(self.socket_timeout)
        return wrapped


class RedisServers(ABC):
    """Connections to all servers of one Redis. `timeout_s`: for each wait on a socket."""

    def __init__(self, max_connections: int, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        self.timeout_s = timeout_s
        self._max_connections = max_connections
        self._tls = tls
        self._lock = threading.Lock()
        self._pools: dict[Address, LinkPool] = {}
        self._closed = False

    @abstractmethod
    def pool_of(self, name: bytes) -> LinkPool:
        """The connections to the server that is in charge of this Redis key. May block. Raises StoreError."""

    def link_to(self, name: bytes) -> Link:
        """A connection to the server that is in charge of this Redis key. May block. Raises StoreError."""
        return self.pool_of(name).link()

    def forget(self) -> None:  # noqa: B027 - a single server has nothing to forget
        """What is known of who is in charge may be out of date."""

    def close(self) -> None:
        """Shut all connections, those in use too: who waits on one is told so at once. Idempotent."""
        self._closed = True
        for pool in list(self._pools.values()):
            pool.close()

    def _pool(self, address: Address, login: Login, db: int = 0) -> LinkPool:
        """Under the lock, or from the constructor."""
        pool = self._pools.get(address)
        if pool is None:
            where = {"host": address.host, "port": address.port}
            kind = Connection if self._tls is None else TlsConnection
            pool = self._pools[address] = self._new_pool(kind, login, db, **where)
            if self._closed:  # by now, and `close` may not have seen this one
                pool.close()
        return pool

    def _new_pool(self, kind: Callable[..., Any], login: Login, db: int, **where: Any) -> LinkPool:
        if self._closed:
            raise UnreachableError("the connector is closed")
        if kind is TlsConnection:
            where["tls"] = self._tls
        connect = functools.partial(
            kind,
            **where,
            db=db,
            username=login.username,
            password=login.password,
            protocol=2,  # the one that has no messages out of turn
            socket_timeout=self.timeout_s,
            socket_connect_timeout=min(_CONNECT_S, self.timeout_s),
        )
        return LinkPool(connect, self._max_connections)


class OneServer(RedisServers):
    """A server at a fixed address."""

    def __init__(self, location: RedisLocation, *common: Any) -> None:
        super().__init__(*common)
        if location.path is not None:
            at = Address(location.path, 0)
            pool = self._new_pool(UnixDomainSocketConnection, location.login, location.db, path=location.path)
            self._pools[at] = pool
            self._only = pool
        else:
            self._only = self._pool(location.addresses[0], location.login, location.db)

    def pool_of(self, name: bytes) -> LinkPool:
        return self._only


class _Learnt(RedisServers):
    """Asks one of several servers, the one that answered last first, who is in charge."""

    def __init__(self, contacts: tuple[Address, ...], *common: Any) -> None:
        super().__init__(*common)
        self._contacts = list(contacts)

    def _ask_around(self, ask: Callable[[Address], T]) -> T:
        """Under the lock. What `ask` returns for the first contact that knows. If none does, or not within the time of
        one call, what the last one raised is raised."""
        last: StoreError = UnreachableError("no server knows who is in charge")
        end_s = time.monotonic() + self.timeout_s
        for contact in list(self._contacts):
            try:
                answer = ask(contact)
            except StoreError as error:
                last = error
            else:
                self._contacts.remove(contact)
                self._contacts.insert(0, contact)
                return answer
            if time.monotonic() > end_s:
                break
        self._rotate()
        raise last

    def _rotate(self) -> None:
        self._contacts.append(self._contacts.pop(0))

    def _keep_pools(self, addresses: set[Address]) -> None:
        for address in set(self._pools) - addresses:
            self._pools.pop(address).close()


class SentinelServers(_Learnt):
    """The master of a service that Redis Sentinel watches."""

    def __init__(self, location: RedisLocation, sentinel_login: Login, *common: Any) -> None:
        super().__init__(location.addresses, *common)
        self._location = location
        self._sentinel_login = sentinel_login
        self._master: Address | None = None

    def pool_of(self, name: bytes) -> LinkPool:
        with self._lock:
            if self._master is None:
                self._master = self._ask_around(self._ask_sentinel)
                self._keep_pools({self._master, *self._contacts})
            return self._pool(self._master, self._location.login, self._location.db)

    def forget(self) -> None:
        with self._lock:
            if self._master is not None:
                self._master = None
                self._rotate()  # a sentinel that was cut off may not know better

    def _ask_sentinel(self, sentinel: Address) -> Address:
        with self._pool(sentinel, self._sentinel_login).link() as link:
            service = self._location.service
            (found,) = link.ask((b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service.encode()))
        if found is None:
            raise StoreError(f"the sentinels watch no service {service!r}")
        return _address(found)


class ClusterServers(_Learnt):
    """The masters of a Redis Cluster, each with its ranges of hash slots."""

    def __init__(self, location: RedisLocation, *common: Any) -> None:
        super().__init__(location.addresses, *common)
        self._seeds = location.addresses
        self._login = location.login
        self._begins: list[int] = []  # first slots of the ranges, ascending; empty: not known
        self._ranges: list[_Range] = []

    def pool_of(self, name: bytes) -> LinkPool:
        slot = key_slot(name)
        with self._lock:
            if not self._begins:
                self._ranges = self._ask_around(self._ask_node)
                self._begins = [begin for begin, _, _ in self._ranges]
                masters = {address for _, _, address in self._ranges}
                self._contacts += sorted(masters - set(self._contacts), key=str)
                self._contacts = [c for c in self._contacts if c in masters or c in self._seeds]
                self._keep_pools(set(self._contacts))
            at = bisect_right(self._begins, slot) - 1
            if at < 0 or self._ranges[at][1] < slot:
                self._begins = []
                raise StoreError("no server of the Redis cluster holds this key's hash slot")
            return self._pool(self._ranges[at][2], self._login)

    def forget(self) -> None:
        with self._lock:
            if self._begins:
                self._begins = []
                self._rotate()

    def _ask_node(self, node: Address) -> list[_Range]:
        with self._pool(node, self._login).link() as link:
            try:
                (found,) = link.ask((b"CLUSTER", b"SLOTS"))
            except ServerError as error:
                if "cluster support disabled" in str(error):
                    raise StoreError("the URL says +cluster, but this Redis is not one") from None
                raise
        try:
            ranges = [(_slot(row[0]), _slot(row[1]), _address(row[2], node.host)) for row in found]  # type: ignore[attr-defined]
        except (TypeError, IndexError):
            raise UnreachableError("what answers does not speak Redis's protocol") from None
        if not ranges:
            raise StoreError("the Redis cluster has not been set up: no hash slots are assigned")
        return sorted(ranges, key=lambda found: found[0])


def _slot(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < _NUM_SLOTS:
        raise UnreachableError("what answers does not speak Redis's protocol")
    return value


def _address(value: Any, default_host: str = "") -> Address:
    """From `[host, port, …]` of a reply. A node that does not know its own name leaves the host empty."""
    try:
        host, port = value[0], int(value[1])
        name = (host or b"").decode() or default_host
    except (TypeError, ValueError, IndexError, AttributeError):
        raise UnreachableError("what answers does not speak Redis's protocol") from None
    if not name or not 0 < port < 65536:
        raise UnreachableError("Redis names a server without an address")
    return Address(name, port)
