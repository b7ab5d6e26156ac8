"""Keeps a folder of items within its capacity and free of what is too old: the background half of `FolderStore`.

Every producer over a folder runs one of these, and they know nothing of each other. What makes that safe:

- The folder is walked a subfolder at a time, at a bounded share of a core, over and over. A walk gives the bytes held
  and the items used least recently; look-ups, loads and saves never list anything.
- What this process saves or removes counts at once, what others do when the walk comes by. The capacity is therefore
  kept up to what the *other* producers save during one walk (a second or less for a thousand items, a minute or two for
  100,000) and what is being written at the moment.
- Once over the capacity, the items used least recently go until a tenth of it is free. Two producers that find out
  together choose the same items, oldest first, and what the other one has removed already counts as removed: they do
  not clear away twice as much. An item is looked at again just before, and stays if it was used since.

An item's time of use is the later of its file's two times: `mtime` is set by saves and loads, `atime` by a producer's
look-ups besides. Whether the file system sets `atime` itself makes no difference that matters. Clocks of the machines
are taken to agree within seconds.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from core.struct import Struct

log = logging.getLogger(__name__)

#: Candidates for removal that a walk remembers, some 5 MB of them. Where more must go, it walks again.
_MAX_CANDIDATES = 16_384
#: Over the capacity, so much of it is kept …
_LOW_WATER = 0.9
#: … and no more than needed is removed where that would leave less than this: a few large items, not many small ones.
_FLOOR = 0.8
#: What a full file system makes us give up at a time, as a share of what is held.
_SHORTAGE = 0.1
#: No writer takes this long for one item; what is older was left behind.
_ABANDONED_AFTER_S = 600.0
#: Folders empty for so long, of weights that nobody serves any more, go. Their writers make them again.
_EMPTY_AFTER_S = 3600.0
#: Longest time that closing goes unnoticed.
_SLICE_S = 0.5

_NAMESPACE_FOLDER = re.compile(r"[0-9a-f]{16}")
_KEY_FOLDER = re.compile(r"[0-9a-f]{2}")
_ITEM = re.compile(r"[0-9a-f]{64}\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


class Pace(Struct, frozen=True):
    """How hard the upkeep works. Shares are of one core."""

    share: float = 0.004  # walking while all is well
    urgent_share: float = 0.25  # walking at the start, and while there is too much and nothing known to remove
    wall_share: float = 0.2  # of the time, waiting for the file system: where a look costs no CPU but a round trip
    period_s: float = 10.0  # from the begin of one walk to the next, at least; varied by a quarter either way


class _Candidate(NamedTuple):
    """Orders as a heap wants it that keeps the oldest: the one used last comes first."""

    minus_used_ns: int
    num_bytes: int
    folder: str
    name: str


class FolderUpkeep:
    """`run` belongs to one thread, which alone removes items. `saved`, `short_of_room`, `take_evictions` and `close`
    may be called by any. `capacity_bytes` is for all namespaces under `root` together; None: no limit."""

    def __init__(self, root: str, capacity_bytes: int | None, ttl_s: float | None, pace: Pace | None = None) -> None:
        self._root = root
        self._capacity_bytes = float("inf") if capacity_bytes is None else capacity_bytes
        self._ttl_s = ttl_s
        self._pace = pace or Pace()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._tally: dict[str, int] = {}  # by folder: bytes at its last walk, and what was saved and removed since
        self._total_bytes = 0  # of the tally
        self._shortage_bytes = 0  # the largest item that the file system had no room for, until room was made
        self._may_give_up_at_s = 0.0
        self._num_evictions = 0
        self._num_settled = 0  # candidates that are out of the way: removed, by whomever, or used since
        self._candidates: list[_Candidate] = []  # of the last whole walk; the oldest is last
        self._walked: set[str] = set()  # folders that the walk under way has done …
        self._removed: set[str] = set()  # … and the names that were removed from them after that
        self._failure: OSError | None = None  # of this walk
        self._logged: int | None = None

    # ---- any thread ----

    @property
    def total_bytes(self) -> int:
        """Bytes of item files, as far as is known."""
        return self._total_bytes

    def saved(self, folder: str, num_bytes: int) -> None:
        """A file of `num_bytes` has become visible in `folder`."""
        with self._lock:
            self._add(folder, num_bytes)
            is_over = self._total_bytes > self._capacity_bytes
        if is_over:
            self._wake.set()

    def short_of_room(self, num_bytes: int) -> None:
        """The file system has no room for an item of `num_bytes`, whatever the capacity says: give up a part of what is
        held, so that later ones fit."""
        with self._lock:
            self._shortage_bytes = max(self._shortage_bytes, num_bytes)
        self._wake.set()

    def take_evictions(self) -> int:
        """Items removed for room or age since the last call."""
        with self._lock:
            evictions, self._num_evictions = self._num_evictions, 0
        return evictions

    def close(self) -> None:
        """Let `run` return."""
        self._closed = True
        self._wake.set()

    # ---- the upkeep's thread ----

    def run(self, closing: threading.Event) -> None:
        """Walk and make room until `closing` is set or `close` was called. No error of the file system ends it."""
        is_urgent = True
        while not self._is_over(closing):
            began_s, settled_before = time.monotonic(), self._num_settled
            self._walk_at_pace(closing, is_urgent)
            has_room = self.make_room()
            self._log_failure(has_room)
            # Walking again at once helps only where there were candidates, and they are used up.
            is_urgent = not has_room and self._num_settled > settled_before
            if not is_urgent:
                self._rest(closing, began_s + self._period_s() - time.monotonic(), until_short=has_room)
                is_urgent = has_room and not self.make_room()

    def walk(self) -> Iterator[str]:
        """One pass over all folders; yields each one's path when it is done, and does nothing more until asked."""
        self._failure = None
        self._walked.clear()
        self._removed.clear()
        oldest: list[_Candidate] = []
        with self._lock:
            known = set(self._tally)
        for namespace_folder in self._subfolders(self._root, _NAMESPACE_FOLDER):
            folders = self._subfolders(namespace_folder, _KEY_FOLDER)
            for folder in folders:
                self._look_at(folder, oldest)
                self._walked.add(folder)
                yield folder
            if not folders:
                self._remove_if_abandoned(namespace_folder)
        if self._failure is None:
            with self._lock:
                for folder in known - self._walked:  # not those that a save has made since
                    self._total_bytes -= self._tally.pop(folder)
        self._candidates = sorted(candidate for candidate in oldest if candidate.name not in self._removed)
        self._walked.clear()
        if not self._candidates:
            self._shortage_bytes = 0  # whoever fills the file system, it is not we

    def make_room(self) -> bool:
        """Remove what was used least recently while there is too much. False: there still is, and what else to remove
        is not known before another walk."""
        limit_bytes = min(self._capacity_bytes, self._bytes_to_keep())
        if self._total_bytes <= limit_bytes:
            return not self._shortage_bytes or bool(self._candidates)
        while self._candidates and self._total_bytes > limit_bytes:
            self._remove(self._candidates.pop())
        # Some more at once, so that not every save is one too many; but one large item is not "some more".
        while self._candidates and self._total_bytes > limit_bytes * _LOW_WATER:
            if self._total_bytes - self._candidates[-1].num_bytes < limit_bytes * _FLOOR:
                break
            self._remove(self._candidates.pop())
        return self._total_bytes <= limit_bytes

    def _walk_at_pace(self, closing: threading.Event, is_urgent: bool) -> None:
        steps = self.walk()
        while not self._is_over(closing):
            wall_s, cpu_s = time.monotonic(), time.thread_time()
            if next(steps, None) is None:
                return
            hurries = not self.make_room() or is_urgent
            wall_s, cpu_s = time.monotonic() - wall_s, time.thread_time() - cpu_s
            share = self._pace.urgent_share if hurries else self._pace.share
            self._rest(closing, max(cpu_s / share - cpu_s, wall_s / self._pace.wall_share - wall_s))

    def _rest(self, closing: threading.Event, seconds: float, *, until_short: bool = False) -> None:
        """Make room where it is asked for. `until_short`: return as soon as there is none to be made."""
        end_s = time.monotonic() + seconds
        while not self._is_over(closing) and (left_s := end_s - time.monotonic()) > 0:
            if self._wake.wait(min(left_s, _SLICE_S)):
                self._wake.clear()
                if not self.make_room() and until_short:
                    return

    def _is_over(self, closing: threading.Event) -> bool:
        return self._closed or closing.is_set()

    def _period_s(self) -> float:
        period_s = self._pace.period_s if self._ttl_s is None else min(self._pace.period_s, max(0.5, self._ttl_s / 2))
        return period_s * random.uniform(0.75, 1.25)

    def _look_at(self, folder: str, oldest: list[_Candidate]) -> None:
        """Tally one folder, remove what is too old there, and add its items to `oldest`."""
        with self._lock:
            before = self._tally.get(folder, 0)
        expired: list[_Candidate] = []
        now_ns = time.time_ns()
        expired_ns = now_ns - int(self._ttl_s * 1e9) if self._ttl_s is not None else 0
        num_bytes, is_empty = 0, True
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    is_empty = False
                    if not _ITEM.fullmatch(entry.name):
                        self._sweep(entry, now_ns)
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    num_bytes += status.st_size
                    candidate = _Candidate(-used_ns(status), status.st_size, folder, entry.name)
                    if status.st_mtime_ns < expired_ns:
                        expired.append(candidate)
                    elif len(oldest) < _MAX_CANDIDATES:
                        heapq.heappush(oldest, candidate)
                    elif candidate > oldest[0]:
                        heapq.heapreplace(oldest, candidate)
        except FileNotFoundError:
            return
        except OSError as error:
            self._failure = error
            return
        with self._lock:
            self._add(folder, num_bytes - before)
        for candidate in expired:
            self._remove(candidate)
        if is_empty:
            self._remove_if_abandoned(folder)

    def _bytes_to_keep(self) -> float:
        """What a full file system leaves us. Once a second: where others fill it, all that we give up is in vain."""
        with self._lock:
            now_s = time.monotonic()
            if not self._shortage_bytes or not self._candidates or now_s < self._may_give_up_at_s:
                return float("inf")
            wanted, self._shortage_bytes = self._shortage_bytes, 0
            self._may_give_up_at_s = now_s + 1.0
            return self._total_bytes - max(2 * wanted, _SHORTAGE * self._total_bytes)

    def _remove(self, item: _Candidate) -> None:
        path = f"{item.folder}/{item.name}"
        try:
            is_as_it_was = used_ns(os.stat(path, follow_symlinks=False)) == -item.minus_used_ns
            if is_as_it_was:
                os.unlink(path)
        except FileNotFoundError:
            if item.folder not in self._walked:  # else it was gone already when the folder was tallied
                with self._lock:
                    self._add(item.folder, -item.num_bytes)
        except OSError as error:
            self._failure = error
            return
        else:
            if is_as_it_was:
                self._removed.add(item.name)
                with self._lock:
                    self._add(item.folder, -item.num_bytes)
                    self._num_evictions += 1
        self._num_settled += 1

    def _sweep(self, entry: os.DirEntry[str], now_ns: int) -> None:
        """Remove what a dead writer left behind. A file of that age has no living writer."""
        if not _TEMPORARY.fullmatch(entry.name):
            return
        try:
            if now_ns - entry.stat(follow_symlinks=False).st_mtime_ns > _ABANDONED_AFTER_S * 1e9:
                os.unlink(entry.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._failure = error

    def _remove_if_abandoned(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # not empty any more, or not ours: then it stays
            if time.time() - os.stat(folder).st_mtime > _EMPTY_AFTER_S:
                os.rmdir(folder)

    def _subfolders(self, folder: str, name: re.Pattern[str]) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                found = [entry for entry in entries if name.fullmatch(entry.name)]
            return [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            self._failure = error
            return []

    def _log_failure(self, has_room: bool) -> None:
        number = self._failure.errno if self._failure is not None else None
        if number is not None and number != self._logged:
            held = "" if has_room else f"; it holds {self._total_bytes} bytes, more than capacity_bytes"
            log.warning("the upkeep of the encoder cache could not do all of it: %s%s", os.strerror(number), held)
        self._logged = number

    def _add(self, folder: str, num_bytes: int) -> None:
        """With the lock held."""
        self._tally[folder] = self._tally.get(folder, 0) + num_bytes
        self._total_bytes += num_bytes


def used_ns(status: os.stat_result) -> int:
    """When the item was saved, loaded or, by a producer, looked up last."""
    return max(status.st_mtime_ns, status.st_atime_ns)
