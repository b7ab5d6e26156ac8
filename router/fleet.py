"""All workers of all stages: waiting until they serve, and seeing to it that they fit together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from core.errors import IncompatibleError
from core.types import Stage
from protos import common_pb2
from router.settings import RouterSettings
from router.workers import Worker, WorkerPool

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_S = 2.0
_FIRST_BACKOFF_S = 0.05
_POLL_INTERVAL_S = 1.0  # the longest backoff at the start, and the pace afterwards

# Field of ServerInfo, what an error calls it, and the stages that must agree on it.
_ALL = frozenset((Stage.ENCODER, Stage.PREFILL, Stage.DECODE))
_AGREEMENT = (
    ("family", "model family", _ALL),
    ("namespace_digest", "namespace_digest", _ALL),
    ("embed_width", "embed_width", _ALL),
    ("kv_layout", "kv_layout", frozenset((Stage.PREFILL, Stage.DECODE))),
)


class Fleet:
    """The three pools. Everything runs on one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self.encoders = WorkerPool(Stage.ENCODER, settings.encoders)
        self.prefills = WorkerPool(Stage.PREFILL, settings.prefills)
        self.decodes = WorkerPool(Stage.DECODE, settings.decodes)
        # What the first worker that answered said of itself, kept for good: whoever comes later must fit it, that same
        # worker included should it come back as something else.
        self._references: dict[str, tuple[object, str]] = {}

    def _pools(self) -> tuple[WorkerPool, ...]:
        return self.encoders, self.prefills, self.decodes

    def workers(self) -> Iterator[Worker]:
        for pool in self._pools():
            yield from pool.workers

    async def wait_until_serving(self) -> None:
        """Poll until each stage has a worker that serves. Raises IncompatibleError as soon as two of them disagree.

        Waits for ever: what starts first is no business of the router's, and its own health says that it is not ready.
        """
        backoff_s = _FIRST_BACKOFF_S
        waiting_for: list[str] = []
        while True:
            await self._poll()
            for worker in self.workers():
                self._check(worker)
            if not self.missing():
                return
            wanted = [f"{pool.stage} ({', '.join(map(_state, pool.workers))})" for pool in self.missing()]
            if wanted != waiting_for:
                logger.warning("waiting for %s", ", ".join(wanted))
                waiting_for = wanted
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _POLL_INTERVAL_S)

    def missing(self) -> list[WorkerPool]:
        """The stages of which no worker serves."""
        return [pool for pool in self._pools() if not pool.serving]

    async def monitor(self) -> None:
        """Keep `serving` and `info` of every worker up to date, until cancelled.

        A worker that comes back as something that does not fit is left out, with an error in the log.
        """
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            before = {worker.address: worker.serving for worker in self.workers()}
            await self._poll()
            for worker in self.workers():
                unfit = False
                try:
                    self._check(worker)
                except IncompatibleError as error:
                    unfit = True
                    if not worker.incompatible:
                        logger.error("%s %s is left out: %s", worker.stage, worker.address, error)
                worker.incompatible = unfit
                if worker.serving != before[worker.address]:
                    state = "serves" if worker.serving else "does not serve any more"
                    logger.warning("%s %s %s", worker.stage, worker.address, state)

    async def _poll(self) -> None:
        await asyncio.gather(*(worker.poll(_POLL_TIMEOUT_S) for worker in self.workers()))

    def _check(self, worker: Worker) -> None:
        if worker.info is None:
            return
        label = f"{worker.stage} {worker.address}"
        for field, what, stages in _AGREEMENT:
            if worker.stage not in stages:
                continue
            theirs: object = getattr(worker.info, field)
            ours, reference = self._references.setdefault(field, (theirs, label))
            if ours != theirs:
                raise IncompatibleError(what, f"{ours!r} ({reference})", f"{theirs!r} ({label})")

    @property
    def language_info(self) -> common_pb2.ServerInfo:
        """What some prefill worker says. Only once `wait_until_serving` has returned."""
        return next(worker.info for worker in self.prefills.workers if worker.info is not None)

    @property
    def namespace(self) -> str:
        """The namespace digest that all stages agreed on."""
        return str(self._references["namespace_digest"][0])

    @property
    def max_images_per_prompt(self) -> int:
        """The smallest limit of any prefill worker."""
        infos = (worker.info for worker in self.prefills.workers)
        return min(info.max_images_per_prompt for info in infos if info is not None)

    @property
    def max_model_len(self) -> int:
        """The smallest of any worker that holds KV blocks."""
        infos = (worker.info for pool in (self.prefills, self.decodes) for worker in pool.workers)
        return min(info.max_model_len for info in infos if info is not None)

    async def close(self) -> None:
        for pool in self._pools():
            await pool.close()


def _state(worker: Worker) -> str:
    return f"{worker.address} {'does not serve yet' if worker.reachable else 'cannot be reached'}"
