"""The leases of one producer: which blocks are pinned, for whoever holds the token, and until when.

A lease is short, and goes on for as long as its consumer says that it wants the blocks: one that died is noticed soon,
one that is slow is never cut off. `max_lease_s` bounds even that.
"""

from __future__ import annotations

import enum
import hmac
import threading
from collections import OrderedDict
from collections.abc import Callable

from connectors.kv.base import KVConnectorOutput, KVLease

#: How many ended leases are remembered, to tell why a late request finds none.
_MAX_ENDED = 4096


class NoLease(enum.Enum):
    """Why a request finds no lease."""

    UNKNOWN = "lease unknown"
    DONE = "lease ended: the consumer was done with it"
    GIVEN_UP = "lease ended: the router gave it up"
    EXPIRED = "lease ended: nobody renewed it in time"
    WRONG_TOKEN = "token refused"  # noqa: S105 - a reason, not a secret


class _Pinned:
    __slots__ = ("added_s", "expires_s", "lease")

    def __init__(self, lease: KVLease, added_s: float, expires_s: float) -> None:
        self.lease = lease
        self.added_s = added_s
        self.expires_s = expires_s


class LeaseTable:
    """Any thread. Times are of the monotonic clock and given by the caller. Each lease ends once and is then in the
    next `take_ended`."""

    def __init__(self, lease_s: float, max_lease_s: float) -> None:
        self._lease_s = lease_s
        self._max_lease_s = max_lease_s
        self._lock = threading.Lock()
        # Whatever is added or renewed goes to the end and lasts `lease_s` from then: the first one expires first.
        self._pinned: OrderedDict[str, _Pinned] = OrderedDict()
        self._ended: OrderedDict[str, NoLease] = OrderedDict()  # by token
        self._finished: list[str] = []
        self._expired: list[str] = []
        self._note_end: Callable[[str], None] | None = None

    def watch(self, ended: Callable[[str], None]) -> None:
        """From now on, call `ended` with the token of each lease that ends, before anybody can learn of it otherwise.
        On the thread that ends it, with the table locked."""
        self._note_end = ended

    def add(self, lease: KVLease, now_s: float) -> bool:
        """Pin. False, and nothing changes, where a lease of that request id exists."""
        with self._lock:
            if lease.request_id in self._pinned:
                return False
            self._pinned[lease.request_id] = _Pinned(lease, now_s, now_s + self._lease_s)
            return True

    def find(self, request_id: str, token: str) -> KVLease | NoLease:
        """The lease that `token` entitles to."""
        with self._lock:
            return self._find(request_id, token)

    def renew(self, request_id: str, token: str, now_s: float) -> KVLease | NoLease:
        """As `find`; and the lease lasts `lease_s` from now, unless it is `max_lease_s` old."""
        with self._lock:
            found = self._find(request_id, token)
            if not isinstance(found, NoLease):
                pinned = self._pinned[request_id]
                if now_s < pinned.added_s + self._max_lease_s:
                    pinned.expires_s = now_s + self._lease_s
                    self._pinned.move_to_end(request_id)
            return found

    def end(self, request_id: str, token: str) -> bool:
        """A consumer is done with it. False, and nothing changes, where `token` entitles to nothing."""
        with self._lock:
            found = self._find(request_id, token)
            if isinstance(found, NoLease):
                return False
            self._end(request_id, NoLease.DONE)
            return True

    def release(self, request_id: str) -> bool:
        """The router gave it up. False where there is none."""
        with self._lock:
            if request_id not in self._pinned:
                return False
            self._end(request_id, NoLease.GIVEN_UP)
            return True

    def expire(self, now_s: float) -> int:
        """End what is over; how many that were."""
        with self._lock:
            count = 0
            while self._pinned:
                request_id, first = next(iter(self._pinned.items()))
                if now_s < first.expires_s:
                    break
                self._end(request_id, NoLease.EXPIRED)
                self._expired.append(request_id)
                count += 1
            return count

    def next_expiry_s(self) -> float | None:
        with self._lock:
            return next(iter(self._pinned.values())).expires_s if self._pinned else None

    def take_ended(self) -> KVConnectorOutput:
        """What ended since the last call."""
        with self._lock:
            output = KVConnectorOutput(finished_sending=self._finished, expired_sending=self._expired)
            self._finished, self._expired = [], []
            return output

    def __len__(self) -> int:
        with self._lock:
            return len(self._pinned)

    def _find(self, request_id: str, token: str) -> KVLease | NoLease:
        ended = self._ended.get(token)
        if ended is not None:
            return ended
        pinned = self._pinned.get(request_id)
        if pinned is None:
            return NoLease.UNKNOWN
        if not hmac.compare_digest(pinned.lease.token.encode(), token.encode()):
            return NoLease.WRONG_TOKEN
        return pinned.lease

    def _end(self, request_id: str, why: NoLease) -> None:
        pinned = self._pinned.pop(request_id)
        if self._note_end is not None:
            self._note_end(pinned.lease.token)
        self._finished.append(request_id)
        self._ended[pinned.lease.token] = why
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
