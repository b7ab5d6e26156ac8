"""Answers "does the store hold this item?" from memory; asks the store on a thread of its own, many keys at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

log = logging.getLogger(__name__)

#: How long an answer waits for the question that began its look-up to be put again. Far longer than any step of an
#: engine: were it shorter, the answer would be out of date whenever the scheduler comes by, and it would wait for ever.
_UNREAD_TTL_S = 5.0
#: For how long new askers may have a look-up begun anew that others wait for: those are to have an answer as well.
DOUBT_S = 0.2


class _Answer:
    __slots__ = ("found", "read", "valid_until_s")

    def __init__(self, found: bool, valid_until_s: float) -> None:
        self.found = found
        self.read = False
        self.valid_until_s = valid_until_s


class LookupTable:
    """Memory of look-ups, at most `max_entries` of them; the one asked for least recently goes first.

    `probe(keys)` runs on the table's thread and says for each key whether the item is there; an exception means that
    none is. The two `ttl_s`: how long an answer is believed, counted from the first time it was given; infinity means
    until `forget`. A probe that takes longer than `timeout_s` is a store that hangs: until it returns every question
    that memory does not answer is answered False, and `on_timeout` is called, once a probe.
    """

    def __init__(
        self,
        probe: Callable[[list[str]], list[bool]],
        notify: Callable[[], None],
        *,
        positive_ttl_s: float,
        negative_ttl_s: float,
        timeout_s: float,
        on_timeout: Callable[[], None],
        max_entries: int = 100_000,
    ) -> None:
        self._probe = probe
        self._notify = notify
        self._ttl_s = {True: positive_ttl_s, False: negative_ttl_s}
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._max_entries = max_entries
        self._probing_since_s: float | None = None
        self._is_timed_out = False
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._under_way: set[str] = set()
        self._questions: list[str] = []
        self._probed: frozenset[str] = frozenset()  # what the store is being asked at this moment
        self._outdated: set[str] = set()  # of those, where a "no" is to be looked up once more
        self._doubted_since_s: OrderedDict[str, float] = OrderedDict()  # keys with no answer given since, monotonic
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ec-lookup", daemon=True)
        self._thread.start()

    def ask(self, key: str) -> bool | None:
        """True, False, or None while a look-up is under way. Any thread; never waits for the store."""
        now_s = time.monotonic()
        with self._changed:
            answer = self._answers.get(key)
            if answer is not None and now_s < answer.valid_until_s:
                if not answer.read:
                    answer.read = True
                    answer.valid_until_s = now_s + self._ttl_s[answer.found]
                self._answers.move_to_end(key)
                if self._doubted_since_s:
                    self._doubted_since_s.pop(key, None)
                return answer.found
            if self._probing_since_s is not None and now_s - self._probing_since_s > self._timeout_s:
                if not self._is_timed_out:
                    self._is_timed_out = True
                    self._on_timeout()
                return False
            if key not in self._under_way and len(self._under_way) < self._max_entries and not self._closed:
                self._under_way.add(key)
                self._questions.append(key)
                self._changed.notify()
            return None

    def doubt(self, key: str) -> None:
        """Somebody new asks about `key`, perhaps because it was just made again: a "no" that was found before now is
        not for him, nor one that is on its way."""
        now_s = time.monotonic()
        with self._changed:
            answer = self._answers.get(key)
            if answer is not None and not answer.found and answer.read:
                del self._answers[key]
                answer = None
            is_unread_no = answer is not None and not answer.found
            if not is_unread_no and key not in self._probed:
                return
            if now_s - self._doubted_since_s.setdefault(key, now_s) > DOUBT_S:
                return
            if len(self._doubted_since_s) > self._max_entries:
                self._doubted_since_s.popitem(last=False)
            if is_unread_no:
                del self._answers[key]
            if key in self._probed:
                self._outdated.add(key)

    def forget(self, key: str) -> None:
        """Believe nothing about `key` any more: a load of it failed, or it has just been stored."""
        with self._changed:
            self._answers.pop(key, None)

    def __len__(self) -> int:
        with self._changed:
            return len(self._answers)

    def close(self, timeout_s: float) -> None:
        """Stop the thread, waiting for it up to `timeout_s`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _remember(self, key: str, found: bool, now_s: float) -> None:
        self._answers[key] = _Answer(found, now_s + _UNREAD_TTL_S)
        self._answers.move_to_end(key)
        if len(self._answers) > self._max_entries:
            self._answers.popitem(last=False)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._questions and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                keys, self._questions = self._questions, []
                self._probed = frozenset(keys)
                self._probing_since_s = time.monotonic()
            try:
                found = self._probe(keys)
            except Exception:  # a stranger's store; without this thread no key would ever be answered
                log.exception("a look-up of %d items failed", len(keys))
                found = [False] * len(keys)
            now_s = time.monotonic()
            with self._changed:
                self._probing_since_s = None
                self._is_timed_out = False
                for key, there in zip(keys, found, strict=True):
                    if key in self._outdated and not there:
                        self._questions.append(key)
                    else:
                        self._under_way.discard(key)
                        self._remember(key, there, now_s)
                self._probed = frozenset()
                self._outdated.clear()
            self._notify()
