"""Encoder-cache items in Redis: which server, what if it is another one by now, and what is removed when.

Nothing here lists the store: no SCAN, no KEYS. How an item travels is in redis_transfer.py.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from connectors.ec.redis_cap import INDEX, ByteCap
from connectors.ec.redis_errors import RedirectedError, ServerError, UnreachableError
from connectors.ec.redis_format import MAX_HEAD_BYTES, ItemHead, chunk_names, item_name, num_chunks, parse_head
from connectors.ec.redis_link import Command, LinkPool
from connectors.ec.redis_servers import RedisServers
from connectors.ec.redis_transfer import DamagedError, ItemWanted, Lifetimes, receive_item, send_item, staged_names
from connectors.ec.store import AbandonedError, ECStore, ItemError, LoadTarget, SaveSource, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Look-ups in one round trip; more make a server answer others late.
_KEYS_PER_TRIP = 1000
#: How much longer chunks live than the item that names them, at least.
_CHUNK_GRACE_MS = 60_000


class RedisStoreSettings(NamedTuple):
    """Of one namespace's items."""

    namespace: str
    ttl_s: float  # of an item that nobody uses
    chunk_bytes: int  # of payload in one value
    timeout_s: float  # no save or load takes longer
    max_bytes: int | None


class RedisStore(ECStore):
    """The items of one namespace. Shares nothing with other objects or processes but what lies in Redis."""

    def __init__(self, servers: RedisServers, settings: RedisStoreSettings) -> None:
        self._servers = servers
        self._namespace = settings.namespace
        self._chunk_bytes = settings.chunk_bytes
        ttl_ms, timeout_ms = int(settings.ttl_s * 1000), int(settings.timeout_s * 1000)
        self._lifetimes = Lifetimes(
            item=ttl_ms, chunk=ttl_ms + max(_CHUNK_GRACE_MS, 2 * timeout_ms), staged=2 * timeout_ms + 10_000
        )
        self._cap: ByteCap | None = None
        if settings.max_bytes is not None:
            self._cap = ByteCap(settings.max_bytes, ttl_ms, self._ask_index, self._remove_items)
        self._lock = threading.Lock()
        self._num_evictions = 0

    def contains(self, keys: Sequence[str]) -> list[bool]:
        found: dict[str, bool] = {}
        # Twice, because a cluster may be found to have moved some keys.
        for _ in range(2):
            missing = [key for key in keys if key not in found]
            for pool, names in self._by_server(missing, lambda key: item_name(self._namespace, key)):
                self._look_up(pool, names, found)
            if all(key in found for key in missing):
                break
            self._servers.forget()
        return [found.get(key, False) for key in keys]

    def read(self, key: str, target: LoadTarget) -> None:
        """A damaged item is removed: while it can be seen, nobody makes it again."""
        wanted = ItemWanted(self._namespace, key, target.dtype, target.shape)
        offset = 0

        def take(piece: memoryview) -> None:
            nonlocal offset
            target.write(piece, offset)
            offset += len(piece)

        def load() -> ItemHead:
            nonlocal offset
            offset = 0
            with self._servers.link_to(wanted.name) as link:
                return receive_item(link, wanted, self._lifetimes, take)

        try:
            head = self._routed(load)
        except DamagedError as error:
            seen = error.seen
            with contextlib.suppress(StoreError, ItemError):
                self._routed(lambda: self._remove_if(key, seen))
            raise
        self._note_use(key, head)

    def write(self, key: str, source: SaveSource) -> None:
        item = ItemWanted(self._namespace, key, source.embeds.dtype, tuple(source.embeds.shape))
        # A save of what is there already is rare, and likely one because a reader found it damaged: so look inside.
        if (head := self._routed(lambda: self._find_whole(item, source))) is not None:
            self._note_use(key, head)
            return
        num_values = num_chunks(source.embeds.nbytes, self._chunk_bytes)
        is_new = False
        if self._cap is not None:
            is_new, evictions = self._cap.make_room(self._namespace, key, source.embeds.nbytes, num_values)
            self._count(evictions)
        try:
            self._routed(lambda: self._save(item, source))
        except Exception:  # whatever ended it, the room was not used
            if self._cap is not None and is_new:
                with contextlib.suppress(StoreError, ItemError):
                    self._cap.give_back(self._namespace, key, source.embeds.nbytes, num_values)
            raise
        if self._cap is not None:
            try:
                self._count(self._cap.settle(self._namespace, key, source.embeds.nbytes, num_values))
            except (StoreError, ItemError) as error:  # the item is here; at worst it is not counted
                log.warning("whether a saved item may stay could not be asked: %s", error)

    def take_counters(self) -> Mapping[str, int]:
        with self._lock:
            evictions, self._num_evictions = self._num_evictions, 0
        return {"evictions": evictions}

    def close(self) -> None:
        self._servers.close()

    # ---- reading ----

    def _look_up(self, pool: LinkPool, items: Sequence[tuple[str, bytes]], found: dict[str, bool]) -> None:
        """Into `found`, but for keys that another server is in charge of."""
        rest = iter(items)
        with self._reporting(), pool.link() as link:
            while batch := list(islice(rest, _KEYS_PER_TRIP)):
                replies = link.ask_each([(b"EXISTS", name) for _, name in batch])
                for (key, _), reply in zip(batch, replies, strict=True):
                    if isinstance(reply, ServerError) and not isinstance(reply, RedirectedError):
                        raise reply
                    if isinstance(reply, int):
                        found[key] = bool(reply)

    # ---- writing ----

    def _find_whole(self, item: ItemWanted, source: SaveSource) -> ItemHead | None:
        """The good item that is there; it lives on, as a loaded one does. A bad one is removed."""
        with self._servers.link_to(item.name) as link:
            if link.ask((b"EXISTS", item.name)) == [0]:
                return None
        try:
            with self._servers.link_to(item.name) as link:
                return receive_item(link, item, self._lifetimes, lambda _piece: source.check())
        except DamagedError as error:
            self._remove_if(item.key, error.seen)
        except ItemError:  # vanished, or in a form that is not this namespace's
            with self._servers.link_to(item.name) as link:
                link.ask((b"UNLINK", item.name))
        return None

    def _save(self, item: ItemWanted, source: SaveSource) -> None:
        """Not there, or damaged, a moment ago."""
        token = secrets.token_bytes(8)
        names = staged_names(item.name, token, source.embeds.nbytes, self._chunk_bytes)
        try:
            with self._servers.link_to(item.name) as link:
                if not send_item(link, item, token, self._chunk_bytes, self._lifetimes, source):
                    link.ask((b"UNLINK", *names))
        except (ServerError, ItemError, AbandonedError):
            # Redis answers; where it does not, the chunks expire by themselves.
            with contextlib.suppress(StoreError), self._servers.link_to(item.name) as link:
                link.ask((b"UNLINK", *names))
            raise

    # ---- removing ----

    def _note_use(self, key: str, head: ItemHead) -> None:
        if self._cap is not None:
            try:
                self._cap.touch(self._namespace, key, head.num_bytes, head.num_chunks)
            except (StoreError, ItemError) as error:  # the item is here; at worst it is evicted too early
                log.warning("the use of an item could not be noted: %s", error)

    def _count(self, evictions: int) -> None:
        with self._lock:
            self._num_evictions += evictions

    def _remove_if(self, key: str, seen: bytes | None) -> None:
        """Remove the item, chunks included, unless somebody has put another one in its place."""
        item = item_name(self._namespace, key)
        with self._servers.link_to(item) as link:
            link.ask((b"WATCH", item))
            (there,) = link.ask_each([_head_of(item)])
            is_same = there.startswith(seen) if isinstance(there, bytes) and seen is not None else seen is None
            if is_same:
                link.ask((b"MULTI",), (b"UNLINK", *_values_of(item, there)), (b"EXEC",))
            else:
                link.ask((b"UNWATCH",))

    def _remove_items(self, items: Sequence[tuple[str, str]]) -> None:
        for pool, names in self._by_server(items, lambda item: item_name(*item)):
            with self._reporting(), pool.link() as link:
                heads = link.ask_each([_head_of(name) for _, name in names])
                replies = link.ask_each(
                    [(b"UNLINK", *_values_of(name, head)) for (_, name), head in zip(names, heads, strict=True)]
                )
            for reply in replies:
                if isinstance(reply, RedirectedError):
                    self._servers.forget()
                if isinstance(reply, ServerError):
                    raise reply

    # ---- servers ----

    def _ask_index(self, command: Command) -> object:
        def ask() -> object:
            with self._servers.link_to(INDEX) as link:
                return link.ask(command)[0]

        return self._routed(ask)

    def _by_server(
        self, items: Iterable[T], name_of: Callable[[T], bytes]
    ) -> list[tuple[LinkPool, list[tuple[T, bytes]]]]:
        """The items and their names, those that one server is in charge of together."""
        groups: dict[int, tuple[LinkPool, list[tuple[T, bytes]]]] = {}
        for item in items:
            name = name_of(item)
            with self._reporting():
                pool = self._servers.pool_of(name)
            groups.setdefault(id(pool), (pool, []))[1].append((item, name))
        return list(groups.values())

    def _routed(self, work: Callable[[], T]) -> T:
        """`work()`, done again once if another server turns out to be in charge of the key."""
        try:
            try:
                return work()
            except RedirectedError:
                self._servers.forget()
            try:
                return work()
            except RedirectedError as error:
                if error.code == "READONLY":
                    raise
                raise ItemError(str(error)) from None  # the store is well, and moving
        except (UnreachableError, RedirectedError):
            self._servers.forget()
            raise

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """A server that does not answer may have lost its office to another one."""
        try:
            yield
        except (UnreachableError, RedirectedError):
            self._servers.forget()
            raise


def _head_of(item: bytes) -> Command:
    return (b"GETRANGE", item, b"0", b"%d" % (MAX_HEAD_BYTES - 1))


def _values_of(item: bytes, head: object) -> list[bytes]:
    """The names of all values of the item, as far as the beginning of its first one tells."""
    if isinstance(head, bytes):
        with contextlib.suppress(ItemError):
            parsed = parse_head(head)
            return [item, *chunk_names(item, parsed.token, range(1, parsed.num_chunks))]
    return [item]
