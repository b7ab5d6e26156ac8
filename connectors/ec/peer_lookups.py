"""The scheduler side's memory of where items can be had, and of what the peers said when they were asked."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from connectors.ec.lookup import DOUBT_S
from connectors.ec.peer_orders import Question
from connectors.ec.peer_wire import Source

#: How long an answer waits for the question to be put again: far longer than any step of an engine.
_UNREAD_TTL_S = 5.0


class _Known:
    __slots__ = ("doubted_since_s", "found", "question", "source", "valid_until_s", "was_read")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.question: Question | None = None  # under way
        self.found = False
        self.was_read = False
        self.valid_until_s = 0.0  # monotonic
        self.doubted_since_s: float | None = None  # no answer was given since


class PeerLookups:
    """At most `max_items`; the one asked for least recently goes first. `put` sends a question on its way; when it has
    ended, `ended` is to be called, on any thread. The two `ttl_s`: how long an answer is believed, from its first use;
    infinity: until `forget`."""

    def __init__(
        self,
        put: Callable[[Question], None],
        *,
        positive_ttl_s: float,
        negative_ttl_s: float,
        timeout_s: float,
        max_items: int = 50_000,
    ) -> None:
        self._put = put
        self._ttl_s = {True: positive_ttl_s, False: negative_ttl_s}
        self._timeout_s = timeout_s
        self._max_items = max_items
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def add_source(self, key: str, source: Source) -> None:
        """The newest one counts. The same one again changes nothing."""
        with self._lock:
            known = self._known.get(key)
            if known is None or known.source != source:
                self._known[key] = _Known(source)
            self._known.move_to_end(key)
            if len(self._known) > self._max_items:
                self._known.popitem(last=False)

    def source_of(self, key: str) -> Source | None:
        with self._lock:
            known = self._known.get(key)
            return known.source if known is not None else None

    def ask(self, key: str) -> bool | None:
        """False where no source is known; else what the peer said, or None while it is being asked. Never waits."""
        now_s = time.monotonic()
        with self._lock:
            known = self._known.get(key)
            if known is None:
                return False
            self._known.move_to_end(key)
            if known.question is not None:
                return None
            if now_s < known.valid_until_s:
                if not known.was_read:
                    known.was_read = True
                    known.valid_until_s = now_s + self._ttl_s[known.found]
                known.doubted_since_s = None
                return known.found
            question = known.question = Question(key, known.source, now_s + self._timeout_s)
        self._put(question)
        return None

    def doubt(self, key: str) -> None:
        """As `LookupTable.doubt`."""
        now_s = time.monotonic()
        with self._lock:
            known = self._known.get(key)
            if known is None or (known.question is None and (known.found or not known.valid_until_s)):
                return
            if known.question is None and known.was_read:
                known.valid_until_s = 0.0
                return
            if known.doubted_since_s is None:
                known.doubted_since_s = now_s
            if now_s - known.doubted_since_s <= DOUBT_S:
                known.question = None  # what comes of it is for nobody
                known.valid_until_s = 0.0

    def forget(self, key: str) -> None:
        """Believe nothing about `key` any more; its source stays."""
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                known.valid_until_s = 0.0

    def ended(self, order: Question) -> None:
        """A question came back, with an answer or without."""
        with self._lock:
            known = self._known.get(order.key)
            if known is None or known.question is not order:
                return  # another source is known since
            known.question = None
            known.found = order.found
            known.was_read = False
            known.valid_until_s = time.monotonic() + _UNREAD_TTL_S
