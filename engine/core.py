"""EngineCore: one model, one scheduler, one executor. A step is scheduled, executed, and its results are taken.

The same class serves all three stages; the roles say which weights it loads and which caches it has. It lives in a
process of its own behind a client (`engine/core_process.py`, `engine/client.py`), or in the caller's
(`engine/inproc_client.py`).

With asynchronous scheduling up to two steps are in flight: while one runs, the next is scheduled and handed to the
executor, on the assumption that every request gets its token and goes on. The runner keeps the tokens that it samples,
so the next step needs nothing from the host. Where the assumption was wrong (a stop token, an abort) one token was
computed for nothing, and the scheduler drops it. What a request's answer is does not depend on any of this.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from connectors.ec.base import ECConnectorBase, ECSide
from connectors.ec.fallback import make_with_fallback
from connectors.factory import make_kv_connector
from connectors.kv.base import KVConnectorBase, KVLayout, KVSide
from core.config import EngineConfig
from core.errors import ConfigError, EngineError
from core.keys import namespace_digest
from core.vision_grid import VisionGrid
from engine.encoder_cache_manager import EncoderCacheManager
from engine.executor.base import Executor, WorkerSpec
from engine.executor.in_process import InProcessExecutor
from engine.executor.multiprocess import MultiprocessExecutor
from engine.executor.worker import ec_connector_config, kv_connector_config
from engine.kv_cache_manager import KVCacheManager
from engine.memory import CacheNeeds, size_caches
from engine.models.registry import open_model
from engine.models.weights import weight_files, weights_digest
from engine.protocol import EngineCoreOutput, EngineCoreRequest, EngineInfo, ErrorKind
from engine.scheduler import Scheduler
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine.settings import SchedulerSettings

logger = logging.getLogger(__name__)

_KV_LAYOUT_VERSION = 1
_MAX_CONCURRENT_STEPS = 2
#: With nothing to compute but something in the background, look again after so long even without being told:
#: connectors need not call `notify`, and leases end by themselves.
_IDLE_POLL_S = 0.005
_LEASE_POLL_S = 0.2
#: A step that takes longer than this will not end: the device hangs, or a connector waits where it must not.
_STEP_TIMEOUT_S = 600.0
#: How many requests of a step that failed the log names.
_MAX_NAMED = 32


@dataclass(slots=True)
class _Step:
    """A step in flight."""

    out: SchedulerOutput
    made: Future[ModelRunnerOutput]
    begun_s: float  # monotonic


class EngineCore:
    """Every method on one thread. `notify` is called from any thread when `step` may have something to do: a step has
    ended, or something in the background has."""

    def __init__(self, config: EngineConfig, notify: Callable[[], None]) -> None:
        self._wake = notify
        self._told = False  # by something in the background, since the last step began
        self._in_flight: deque[_Step] = deque()
        self._max_in_flight = _MAX_CONCURRENT_STEPS if config.async_scheduling else 1
        self._begun_s = 0.0
        self._resources = ExitStack()
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig) -> None:
        started_s = time.monotonic()
        model_dir = Path(config.model)
        # Facts only: the worker has an adapter of its own, on its own thread, which it loads weights into.
        adapter = self._adapter = open_model(model_dir, config.dtype)
        self._vision, self._language = config.ec_role.produces, config.ec_role.consumes
        max_model_len = config.max_model_len or adapter.max_position
        if max_model_len > adapter.max_position:
            raise ConfigError("--max-model-len", max_model_len, f"the model has {adapter.max_position} positions")
        weights = weights_digest(model_dir, weight_files(model_dir))
        dtype = str(adapter.dtype).removeprefix("torch.")
        namespace = namespace_digest(
            weights=weights, preprocessing=VisionGrid.from_model(model_dir).preprocessing_id(), dtype=dtype
        )
        layout = KVLayout(
            version=_KV_LAYOUT_VERSION,
            model=weights,
            dtype=dtype,
            num_layers=adapter.num_layers,
            block_size=config.block_size,
            num_kv_heads=adapter.num_kv_heads,
            head_dim=adapter.head_dim,
        )
        spec = WorkerSpec(config, max_model_len, namespace, layout, uuid.uuid4().hex)
        ec, kv = self._make_connectors(spec)
        executor = self.executor = _make_executor(spec, ec, kv, self._tell)
        self._resources.callback(executor.shutdown)
        report = executor.load_model()
        row_bytes = adapter.embed_width * adapter.dtype.itemsize
        sizes = size_caches(
            CacheNeeds(
                block_bytes=layout.elements_per_block * adapter.dtype.itemsize if self._language else 0,
                block_size=config.block_size,
                row_bytes=row_bytes,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                num_gpu_blocks=config.num_gpu_blocks,
                encoder_cache_bytes=config.encoder_cache_bytes,
            ),
            report.available_bytes,
        )
        handshakes = executor.initialize_caches(sizes)
        ec.set_handshake(handshakes.ec)
        if kv is not None and handshakes.kv is not None:
            kv.set_handshake(handshakes.kv)
        self.scheduler = Scheduler(
            SchedulerSettings(
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_waiting=config.max_waiting,
                where=config.where,
                kv_load_failure_policy=config.kv_load_failure_policy,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                max_num_partial_prefills=config.max_num_partial_prefills,
            ),
            KVCacheManager(sizes.num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching),
            EncoderCacheManager(sizes.buffer_rows, row_bytes),
            ec,
            kv,
        )
        self.info = EngineInfo(
            pid=os.getpid(),
            family=str(adapter.config.model_type),
            namespace_digest=namespace,
            dtype=dtype,
            device=report.device,
            max_model_len=max_model_len,
            embed_width=adapter.embed_width,
            kv_layout=layout.describe() if self._language else "",
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            encoder_cache_bytes=sizes.buffer_rows * row_bytes,
            weights_loaded_bytes=report.loaded_bytes,
            weights_skipped_bytes=report.skipped_bytes,
        )
        logger.info(
            "ready in %.1f s: %s %s on %s, %d KV blocks of %d tokens, encoder buffer of %d rows",
            time.monotonic() - started_s,
            self.info.family,
            dtype,
            report.device,
            sizes.num_blocks,
            config.block_size,
            sizes.buffer_rows,
        )

    def _make_connectors(self, spec: WorkerSpec) -> tuple[ECConnectorBase, KVConnectorBase | None]:
        """The scheduler sides. Before anything is loaded, so that a wrong setting is found at once."""
        config = spec.config
        ec = make_with_fallback(
            config.ec_connector,
            config.ec_fallback,
            ec_connector_config(spec, self._adapter, self._tell),
            ECSide.SCHEDULER,
        )
        self._resources.callback(ec.close)
        kv_config = kv_connector_config(spec, self._tell)
        if config.kv_connector is None or kv_config is None:
            return ec, None
        kv = make_kv_connector(config.kv_connector, kv_config, KVSide.SCHEDULER)
        self._resources.callback(kv.close)
        return ec, kv

    def _tell(self) -> None:
        """Any thread: something in the background has ended."""
        self._told = True
        self._wake()

    # ---- requests ----

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request; one that this engine's role cannot serve ends with an error in the next step."""
        wants_vision = request.image is not None
        if (wants_vision and not self._vision) or (not wants_vision and not self._language):
            stage = "an encoder" if wants_vision else "a language model"
            reason = f"the request needs {stage}, and this worker has none (--ec-role)"
            self.scheduler.refuse(request.request_id, ErrorKind.INCOMPATIBLE, reason)
            return
        if not wants_vision and (reason := self._problem_with(request)):
            self.scheduler.refuse(request.request_id, ErrorKind.INVALID_REQUEST, reason)
            return
        self.scheduler.add_request(request)

    def _problem_with(self, request: EngineCoreRequest) -> str:
        """What would end the engine in the middle of a step, and with it every other request; "" where all is well."""
        num_prompt, num_given = len(request.prompt_token_ids), len(request.output_token_ids)
        if not 0 < num_prompt <= num_prompt + num_given < self.info.max_model_len:
            limit = self.info.max_model_len
            return f"prompt: {num_prompt} tokens and {num_given} generated ones, max_model_len is {limit}"
        vocab_size = self._adapter.vocab_size
        for token_ids in (request.prompt_token_ids, request.output_token_ids):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                return f"prompt: holds a token outside the vocabulary of {vocab_size}"
        end = 0
        for i, placed in enumerate(request.features, start=1):
            if not end <= placed.offset < placed.end <= num_prompt:
                return f"image {i}: has tokens {placed.offset} to {placed.end}, free are {end} to {num_prompt}"
            end = placed.end
        try:
            self._adapter.positions(num_prompt, request.features)
        except ValueError:
            return "images: a grid and its number of embeddings contradict each other"
        return ""

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def release(self, request_id: str) -> None:
        self.scheduler.release(request_id)

    # ---- steps ----

    @property
    def is_settled(self) -> bool:
        """Whether no request, no background work and no step is left; leases may be."""
        return not (self.scheduler.has_work or self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether steps are needed: requests, steps and background work under way, or leases that may end."""
        return not self.is_settled or self.scheduler.kv.num_leases + self.scheduler.num_ec_leases > 0

    def wait_s(self) -> float | None:
        """How long `step` would find nothing to do unless `notify` is called before: 0.0 it has something to do now,
        None it never would."""
        if self._in_flight and self._in_flight[0].made.done():
            return 0.0
        if self._may_begin():
            return 0.0
        now_s = time.monotonic()
        if self._in_flight:
            return max(0.0, self._in_flight[0].begun_s + _STEP_TIMEOUT_S - now_s)
        if not self.has_work:
            return None
        return max(0.0, self._begun_s + self._poll_every_s - now_s)

    def step(self) -> list[EngineCoreOutput]:
        """Begin a step where there is room and reason, and take the oldest one's results where they are there; returns
        what they tell. Does not wait for a step, unless the executor does its work on this thread.

        Raises EngineError, or whatever a step raised; the engine is of no more use then.
        """
        self.check_health()
        if self._may_begin() or (not self._in_flight and self.wait_s() == 0.0):
            self._begin()
        if not self._in_flight:
            return []
        oldest = self._in_flight[0]
        if not oldest.made.done():
            if time.monotonic() - oldest.begun_s > _STEP_TIMEOUT_S:
                self._log_failure(oldest)
                raise EngineError(f"a step has not ended within {_STEP_TIMEOUT_S:g} s")
            return []
        self._in_flight.popleft()
        try:
            made = oldest.made.result()
        except BaseException:
            self._log_failure(oldest)
            raise
        return self.scheduler.update_from_output(oldest.out, made)

    def check_health(self) -> None:
        """Raise EngineError where a worker is gone."""
        try:
            self.executor.check_health()
        except EngineError:
            for step in self._in_flight:
                self._log_failure(step)
            raise

    def _may_begin(self) -> bool:
        if len(self._in_flight) >= self._max_in_flight:
            return False
        return self.scheduler.can_step or (self._told and self.has_work)

    @property
    def _poll_every_s(self) -> float:
        return _IDLE_POLL_S if self.scheduler.has_work else _LEASE_POLL_S

    def _begin(self) -> None:
        self._told = False
        self._begun_s = time.monotonic()
        out = self.scheduler.schedule()
        made = self.executor.execute_model(out)
        self._in_flight.append(_Step(out, made, self._begun_s))
        if not made.done():
            made.add_done_callback(lambda _: self._wake())

    def _log_failure(self, step: _Step) -> None:
        names = [*step.out.num_scheduled_tokens, *(image.feature.key for image in step.out.encode)]
        shown = ", ".join(islice(names, _MAX_NAMED))
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        logger.error("a step failed; its requests and items: %s%s", shown or "none", more)

    def close(self) -> None:
        """Stop every thread and process. Idempotent."""
        self._resources.close()


def _make_executor(
    spec: WorkerSpec, ec: ECConnectorBase, kv: KVConnectorBase | None, notify: Callable[[], None]
) -> Executor:
    backend = spec.config.distributed_executor_backend
    if backend == "uni":
        return InProcessExecutor(spec, notify, threaded=spec.config.async_scheduling)
    if backend != "mp":
        raise ConfigError("--distributed-executor-backend", backend, "is not one of uni, mp")
    # Nothing has been asked of the connectors yet, so there is nothing in it: what counts is its class.
    ec_metadata = type(ec.build_connector_meta())
    return MultiprocessExecutor(spec, ec_metadata, None if kv is None else type(kv.build_connector_meta()), notify)
