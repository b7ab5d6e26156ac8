"""Which workers there are, whether they serve, and whether they fit together. `router.fleet` gives them their calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from core.types import Stage
from protos import common_pb2
from router.agreement import Agreement
from router.metrics import RouterMetrics
from router.policies.registry import make_policy
from router.predictor import Predictor
from router.probes import Probes
from router.settings import DNS_PREFIX, RouterSettings
from router.workers import Worker, WorkerPool

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
#: What nobody answered by then is worth a line in the log.
_FIRST_WAIT_S = 0.5
#: A worker that left keeps its channel at least so long: blocks that it leases are pulled or given up by then.
_LINGER_S = 60.0
#: Workers of one stage. More are a mistake in a list, or a name that resolves to half the world.
MAX_WORKERS = 1024


class Membership:
    """The three pools. Everything runs on one event loop. `start` begins probing, `close` ends it."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics | None = None) -> None:
        """Raises ConfigError that names the option of a policy that cannot be made."""
        self._settings = settings
        self._metrics = metrics
        self.encoders = WorkerPool(Stage.ENCODER, make_policy("--encode-policy", settings.encode_policy))
        self.prefills = WorkerPool(Stage.PREFILL, make_policy("--prefill-policy", settings.prefill_policy))
        self.decodes = WorkerPool(Stage.DECODE, make_policy("--decode-policy", settings.decode_policy))
        self.pools = {pool.stage: pool for pool in (self.encoders, self.prefills, self.decodes)}
        self._agreement = Agreement()
        self.predictor = Predictor()
        self._probes: dict[Worker, Probes] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._started = False
        self._changed = asyncio.Event()
        #: Called on the event loop after each change, whoever it was that came, went or changed.
        self.on_change: Callable[[], None] = lambda: None
        self._logged_states: dict[Worker, bool] = {}
        #: Of a prefill worker, and the smallest limits of any worker that fits. Only once `has_agreed`.
        self.language_info = common_pb2.ServerInfo()
        self.max_images_per_prompt = 0
        self.max_model_len = 0
        for stage, entries in settings.entries():
            for entry in entries:
                if not entry.startswith(DNS_PREFIX):  # `router.discovery` follows these
                    self.add(stage, entry)

    def workers(self) -> Iterator[Worker]:
        for pool in self.pools.values():
            yield from pool.workers

    # -- who belongs to it --

    def add(self, stage: Stage, address: str) -> bool:
        """A worker to reckon with, whether it serves already or not. False where it was there, or there is no room."""
        pool = self.pools[stage]
        if pool.find(address) is not None:
            return False
        if len(pool.workers) >= MAX_WORKERS:
            logger.error("%s %s is left out: there are %d of its stage", stage, address, MAX_WORKERS)
            return False
        worker = Worker(stage, address)
        pool.workers.append(worker)
        self._probes[worker] = Probes(worker, self, worker_timeout_s=self._settings.worker_timeout_s)
        if self._started:
            logger.warning("%s is new", worker.label)
            self._probes[worker].start()
        return True

    def remove(self, stage: Stage, address: str) -> bool:
        """No new calls for that worker. False where there is none."""
        pool = self.pools[stage]
        worker = pool.find(address)
        if worker is None:
            return False
        worker.leaving = True
        pool.workers.remove(worker)
        if worker.instance_id:
            pool.policy.left(worker)
        if self._started:
            logger.warning("%s leaves", worker.label)
        task = asyncio.create_task(self._see_off(worker, self._probes.pop(worker)))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self._settle()
        return True

    async def _see_off(self, worker: Worker, probes: Probes) -> None:
        # Its probes go on: a worker that dies with calls under way must still be found out.
        try:
            await asyncio.sleep(_LINGER_S)
            await worker.wait_idle()
        finally:
            await probes.stop()
            await worker.close()

    # -- waiting for them --

    def start(self) -> None:
        """Begin to probe. Without effect the second time."""
        if not self._started:
            self._started = True
            for probes in self._probes.values():
                probes.start()

    async def wait_until_serving(self) -> None:
        """Return once each stage has a worker that serves, and they fit together.

        Waits for ever: what starts first is no business of the router's.
        Raises IncompatibleError where all that there will ever be have answered and cannot serve together.
        """
        self.start()
        wait_s, waiting_for = _FIRST_WAIT_S, ""
        while self.missing():
            if not self._settings.is_open:
                self._agreement.check_possible(list(self.workers()))
            self._changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                wait_s = _LOOK_AGAIN_S
                wanted = ", ".join(f"{pool.stage} ({_states(pool)})" for pool in self.missing())
                if wanted and wanted != waiting_for:
                    logger.warning("waiting for %s", wanted)
                    waiting_for = wanted

    @property
    def has_agreed(self) -> bool:
        """Whether there ever was a worker of each stage, and all of them fitted together."""
        return self._agreement.namespace is not None

    def missing(self) -> list[WorkerPool]:
        """The stages of which no worker serves."""
        if self._agreement.namespace is None:
            return [pool for pool in self.pools.values() if not pool.serving] or list(self.pools.values())
        return [pool for pool in self.pools.values() if not pool.serving]

    async def monitor(self) -> None:
        """Until cancelled. Probes do the work; this keeps the metrics true where time alone changes a state."""
        while True:
            self._count_states()
            await asyncio.sleep(_LOOK_AGAIN_S)

    # -- what probes report --

    def met(self, worker: Worker, info: common_pb2.ServerInfo) -> None:
        """See `probes.Listener`."""
        pool = self.pools[worker.stage]
        is_new = worker.instance_id != info.instance_id or not worker.instance_id
        worker.info = info
        if is_new:
            worker.instance_id = info.instance_id or worker.address
            worker.breaker.succeed()  # whatever failed was another process
            if not worker.leaving:
                pool.policy.joined(worker)
        if worker.stage is Stage.ENCODER and info.HasField("vision_rule"):
            self.predictor.learn(info.vision_rule)

    def changed(self, worker: Worker) -> None:
        """See `probes.Listener`."""
        worker.serving = worker.healthy and worker.reachable and worker.responsive
        self._settle()

    def lost(self, worker: Worker) -> None:
        """See `probes.Listener`."""
        self.open_breaker(worker, hard=True)
        worker.lose_calls()

    def _settle(self) -> None:
        self._agreement.settle(self.workers())
        self._find_limits()
        for worker in self.workers():
            serves = worker.serving and worker.fits
            if serves != self._logged_states.get(worker, False):
                level = logging.INFO if serves else logging.WARNING
                logger.log(level, "%s %s", worker.label, "serves" if serves else f"does not serve: {worker.state}")
        self._logged_states = {worker: worker.serving and worker.fits for worker in self.workers()}
        self._count_states()
        self._changed.set()
        self.on_change()

    def _count_states(self) -> None:
        if self._metrics is not None:
            self._metrics.count_workers((worker.stage, worker.state) for worker in self.workers())

    # -- what they have in common --

    @property
    def namespace(self) -> str:
        """The namespace digest that all stages agreed on. Only once `has_agreed`."""
        assert self._agreement.namespace is not None
        return self._agreement.namespace

    def _find_limits(self) -> None:
        """What every request is checked against: kept, because it changes with the workers only."""
        prefills = [worker.info for worker in self.prefills.workers if worker.info is not None and worker.fits]
        decodes = [worker.info for worker in self.decodes.workers if worker.info is not None and worker.fits]
        # All of a stage may be gone for a moment, as one of a single worker is while that restarts: what was stands.
        if prefills and decodes:
            self.language_info = prefills[0]
            self.max_images_per_prompt = min(info.max_images_per_prompt for info in prefills)
            self.max_model_len = min(info.max_model_len for info in (*prefills, *decodes))

    # -- breakers --

    def open_breaker(self, worker: Worker, *, hard: bool) -> None:
        """A call failed; `hard`: the worker could not even be reached."""
        if worker.breaker.fail(asyncio.get_running_loop().time(), hard=hard):
            logger.warning("%s is left alone for a moment", worker.label)
            if self._metrics is not None:
                self._metrics.count_breaker_open(worker.stage)
        self._count_states()

    async def close(self) -> None:
        """End the probes, close the channels."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(probes.stop() for probes in self._probes.values()))
        for worker in self.workers():
            await worker.close()


def _states(pool: WorkerPool) -> str:
    return ", ".join(f"{worker.address} {_STATES[worker.state]}" for worker in pool.workers) or "no address yet"


_STATES = {
    "leaving": "leaves",
    "refused": "does not fit",
    "unreachable": "cannot be reached",
    "silent": "does not answer",
    "not serving": "does not serve yet",
    "failing": "fails",
    "serving": "serves",
}
