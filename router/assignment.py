"""One call's place at a worker: its share of that worker's load, and the word on how the call went."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from router.work import Work

if TYPE_CHECKING:
    from router.fleet import Fleet
    from router.workers import Worker


class Assignment:
    """Made by `Fleet.choose`, used as a context manager around the call. Event loop only.

    The worker counts the work as its own until `succeeded`, `failed`, `misbehaved` or the end of the `with` block,
    whichever is first; what comes after that has no effect. A block that ends without a word (a cancel, a deadline)
    says nothing about the worker.
    """

    __slots__ = ("_ended", "_fleet", "charge", "is_probe", "lost", "on_lost", "work", "worker")

    def __init__(self, fleet: Fleet, worker: Worker, work: Work, *, charge: float, is_probe: bool) -> None:
        self._fleet = fleet
        self._ended = False
        self.worker = worker
        self.work = work
        self.charge = charge  # what the policy takes the work to cost this worker
        self.is_probe = is_probe  # of the worker's breaker
        #: The worker was found dead, stopped or cut off during the call. Set before `on_lost` is called.
        self.lost = False
        #: Called once, on the event loop, when that happens: set it to the call's `cancel`. A process that was stopped,
        #: or whose network vanished, ends no call by itself.
        self.on_lost: Callable[[], object] | None = None

    def __enter__(self) -> Assignment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(None)

    def answered(self) -> None:
        """The worker sent something sound, a stream's first message say: it is well. The assignment goes on."""
        if not self._ended:
            self._fleet.note_answer(self)

    def succeeded(self) -> None:
        """The call ended as it should. Tells the breaker."""
        if not self._ended:
            self._fleet.note_answer(self)
            self._end(True)

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """The call ended with a status. The fleet knows which of them speak against the worker: connections that fail
        do so at once, a worker's own UNAVAILABLE and INTERNAL when they repeat, RESOURCE_EXHAUSTED makes others
        preferred for a moment, refusals of the request and a deadline do not."""
        if not self._ended:
            self._fleet.note_failure(self, error)
            self._end(False)

    def misbehaved(self, what: str) -> None:
        """The answer does not hold (another key than the image has, a stream without an end): counts as a failure that
        may repeat. `what` is for the log."""
        if not self._ended:
            self._fleet.note_misbehaviour(self, what)
            self._end(False)

    def lose(self) -> None:
        """The fleet's: the worker is lost."""
        self.lost = True
        callback, self.on_lost = self.on_lost, None
        if callback is not None:
            callback()

    def _end(self, success: bool | None) -> None:
        if not self._ended:
            self._ended = True
            self._fleet.end(self, success)
