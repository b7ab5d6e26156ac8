"""What a routing policy is. One object a stage, made at the start; everything on one event loop, nothing may wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from router.work import Work


class Candidate(Protocol):
    """What a policy sees of a worker. `router.workers.Worker` is one."""

    @property
    def address(self) -> str: ...
    @property
    def calls(self) -> int:
        """Calls of this router's that are under way there."""
        ...

    @property
    def cost(self) -> float:
        """What `Policy.charge` said of them, together."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV they will hold."""
        ...

    @property
    def other_calls(self) -> int:
        """Requests that the worker said it has beyond ours, as of its last report: other routers'."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait there, whoever's, as of its last report."""
        ...

    @property
    def other_kv_tokens(self) -> int:
        """KV held beyond ours, in tokens, as of its last report."""
        ...

    @property
    def kv_capacity(self) -> int:
        """KV that the worker has room for, in tokens; 0 where it never said."""
        ...


class Policy(ABC):
    """Picks workers for one stage. A subclass in any module is used with `--…-policy MODULE:CLASS`."""

    @abstractmethod
    def choose(self, work: Work, candidates: Sequence[Candidate]) -> Candidate:
        """One of `candidates`, which holds at least one and only those that serve. Changes nothing."""

    def charge(self, work: Work, worker: Candidate) -> float:
        """How much of `work` this worker would have to do: what `Candidate.cost` adds up. Changes nothing."""
        return work.cost

    def assigned(self, work: Work, worker: Candidate) -> None:
        """`worker` gets `work` now. Not always the one that `choose` named: a last resort is taken without it."""
        return

    def failed(self, work: Work, worker: Candidate) -> None:
        """What was assigned came to nothing there."""
        return

    def joined(self, worker: Candidate) -> None:
        """`worker` serves from now on, for the first time or as a new process that remembers nothing."""
        return

    def left(self, worker: Candidate) -> None:
        """`worker` is gone for good."""
        return
