"""Host copies of items whose place in the encoder buffer is about to be given back: bounded, made by one thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from connectors.device_copy import DeviceCopies

log = logging.getLogger(__name__)


class HostCopy:
    """A copy of one item, `[num_embeds, width]`, once `is_done`; None in `tensor` then means that it was not made.
    `users` counts those who still read it."""

    __slots__ = ("is_done", "num_bytes", "tensor", "users")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.tensor: torch.Tensor | None = None
        self.is_done = False
        self.users = 0


class HostCopies:
    """At most `max_bytes` at a time. `begin`, `release` and `take_done` belong to one thread; `notify` is called on the
    copying one, after each copy."""

    def __init__(self, max_bytes: int, copies: DeviceCopies, notify: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._copies = copies
        self._notify = notify
        self._used_bytes = 0
        self._queue: deque[tuple[HostCopy, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._done: deque[HostCopy] = deque()
        self._num_under_way = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        return self._num_under_way == 0

    def begin(self, embeds: torch.Tensor, after: torch.cuda.Event | None = None) -> HostCopy | None:
        """Copy `embeds`, which must not change until `take_done` names the copy. None where there is no room for it."""
        if self._used_bytes + embeds.nbytes > self._max_bytes or self._closed:
            return None
        copy = HostCopy(embeds.nbytes)
        self._used_bytes += copy.num_bytes
        self._num_under_way += 1
        if self._thread is None:  # most engines never copy anything
            self._thread = threading.Thread(target=self._run, name="ec-tier-copies", daemon=True)
            self._thread.start()
        with self._changed:
            self._queue.append((copy, embeds, after))
            self._changed.notify()
        return copy

    def take_done(self) -> list[HostCopy]:
        """The copies that ended since the last call."""
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._num_under_way -= len(done)
        return done

    def release(self, copy: HostCopy) -> None:
        """Nobody needs it any more. Once for each copy, after it is done."""
        copy.tensor = None
        self._used_bytes -= copy.num_bytes

    def close(self, timeout_s: float) -> None:
        """Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                copy, embeds, after = self._queue.popleft()
            try:
                on_host = self._copies.on_host
                copy.tensor = embeds.clone() if on_host else self._copies.to_host([embeds], after)[0]
            except Exception:  # out of memory, say: the item is where it was saved to first
                log.exception("an item of the encoder cache could not be copied")
            copy.is_done = True
            del embeds
            self._done.append(copy)
            self._notify()
