"""Decides, step by step, which tokens of which requests are computed.

One token budget, no separate prefill and decode modes: a request has tokens that are known (prompt, and output so far)
and tokens that are computed, and a step closes some of the gap. Three phases: running requests, waiting ones, and the
output that the runner acts on. The design is vLLM V1's (`v1/core/sched/scheduler.py`).

What keeps a request from running does not block the others: it is *parked*, WAITING_FOR_ENCODER_CACHE while an item of
its is looked up or loaded, WAITING_FOR_REMOTE_KVS while its blocks are pulled. A new request waits a moment for its
items, since a load is usually over before a step would be, and a step reads all weights however few tokens it
computes; after that it is computed as far as its first absent item. Items whose look-up says no are named to the
caller (`missing`), and the request ends.

Holding things cannot deadlock: a request holds at most the item that it needs next and KV blocks. Blocks of parked and
running requests can be taken (preemption: recompute later), and items that only waiting requests hold can be taken too.

More than 400 lines, since the phases, preemption and the ends of requests work on the same four collections; what
touches only the encoder buffer is in `item_gate.py`, images to encode are in `encode_queue.py`.
"""

from __future__ import annotations

import time
from collections import deque

from connectors.ec.base import ECConnectorBase
from connectors.kv.base import KVConnectorBase, KVConnectorOutput
from core.errors import IncompatibleError, TriptychError
from core.types import FinishReason, KVRole, Span, Usage
from engine.encode_queue import EncodeQueue
from engine.encoder_cache_manager import EncoderCacheManager
from engine.item_gate import ItemGate
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import EngineCoreOutput, EngineCoreRequest, EngineStats, ErrorKind
from engine.request import Ended, Request, RequestStatus
from engine.scheduler_output import CachedRequestData, ItemUse, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.settings import SchedulerSettings
from engine.stats import StatsCollector

_PARKED = (RequestStatus.WAITING_FOR_ENCODER_CACHE, RequestStatus.WAITING_FOR_REMOTE_KVS)


class Scheduler:
    """All state of an engine's requests. Every method runs on the step thread and none of them does I/O."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KVCacheManager,
        cache: EncoderCacheManager,
        ec_connector: ECConnectorBase,
        kv_connector: KVConnectorBase | None,
    ) -> None:
        self.settings = settings
        self.kv = kv
        self.cache = cache
        self.stats = StatsCollector()
        self._ec = ec_connector
        self._kv_connector = kv_connector
        self.encodes = EncodeQueue(
            cache,
            ec_connector,
            self.stats,
            max_batched_embeds=settings.max_num_batched_tokens,
            where=settings.where,
        )
        self._items = ItemGate(
            cache, ec_connector, self.encodes, self.stats, settings, lambda: (*self._waiting, *self._parked.values())
        )
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._parked: dict[str, Request] = {}
        self._known: set[str] = set()  # requests whose state the runner holds
        self._forget: list[str] = []  # requests that the runner must drop
        self._ready_outputs: list[EngineCoreOutput] = []  # ends that no model run brings
        self._news = False  # whether the next step may do what the last could not
        self._evictions_counted = 0

    # ---- requests come and go ----

    @property
    def num_requests(self) -> int:
        return len(self._requests) + len(self.encodes)

    @property
    def has_work(self) -> bool:
        """Whether a step may bring something now or soon: requests, saves under way, pulls to let go of."""
        return bool(
            self._requests
            or self.encodes.num_unfinished_jobs
            or self._ready_outputs
            or self._forget
            or self._items.is_loading
        )

    @property
    def can_step(self) -> bool:
        """Whether the next step may bring something, as against wait for a look-up, a load, a pull or a lease's end.
        Waiting requests alone are no reason: the last step has found no room for them."""
        return bool(self._running or self._ready_outputs or self._news)

    def add_request(self, made: EngineCoreRequest) -> None:
        """Take a request. One that cannot be served ends with an error in the next step's outputs."""
        self._news = True
        if made.request_id in self._requests or self.kv.has_lease(made.request_id) or made.request_id in self.encodes:
            self.refuse(made.request_id, ErrorKind.INVALID_REQUEST, f"request id {made.request_id} is in use")
            return
        if self.num_requests >= self.settings.max_waiting:
            self.refuse(made.request_id, ErrorKind.OVERLOADED, f"{self.num_requests} requests are held, the limit")
            return
        if made.image is not None and made.feature is not None:
            if made.feature.num_embeds > self.cache.num_rows:
                self.refuse(made.request_id, ErrorKind.INVALID_REQUEST, self._too_large(made.feature.num_embeds))
            else:
                self.encodes.add(made)
            return
        role = None if self._kv_connector is None else self._kv_connector.config.role
        for wanted, fits, what in (
            (made.hand_over, role is not None and role.produces, KVRole.PRODUCER),
            (made.kv is not None, role is not None and role.consumes, KVRole.CONSUMER),
        ):
            if wanted and not fits:
                reason = f"the request needs a {what}, this worker is {role or 'none'} (--kv-role, --kv-connector)"
                self.refuse(made.request_id, ErrorKind.INCOMPATIBLE, reason)
                return
        request = Request.from_core(made, self.settings.max_model_len)
        for placed in request.features:
            if placed.feature.num_embeds > self.cache.num_rows:
                self.refuse(made.request_id, ErrorKind.INVALID_REQUEST, self._too_large(placed.feature.num_embeds))
                return
        if request.kv is None:
            self._items.look_ahead(request)
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self.stats.count("prompt_tokens_total", request.num_prompt_tokens)

    def abort(self, request_id: str) -> None:
        """End a request without an answer and free all that it holds. Unknown ids are ignored."""
        self._news = True
        if self.encodes.abort(request_id):
            return
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            # The connector may be writing into its blocks; they are freed when it reports that it has stopped.
            assert self._kv_connector is not None
            if not request.aborted:
                self._kv_connector.cancel_recv(request_id)
                request.aborted = True
            return
        self._remove(request)
        self._end(request, Ended(RequestStatus.FINISHED_ABORTED), tell=False)

    def release(self, request_id: str) -> None:
        """The router gave up the handle of a finished prefill. Unknown ids are ignored."""
        if self._kv_connector is not None and self.kv.has_lease(request_id):
            self._kv_connector.release(request_id)

    # ---- phase one to three ----

    def schedule(self) -> SchedulerOutput:
        """This step's work. The runner must execute it, and `update_from_output` must follow."""
        out = SchedulerOutput()
        self._news = False
        self._ready_outputs += self.encodes.schedule(out)
        self._unpark()
        preemptions = self.stats.counters["num_preemptions_total"]
        budget = self._schedule_running(out, self.settings.max_num_batched_tokens)
        if self.stats.counters["num_preemptions_total"] == preemptions:
            self._schedule_waiting(out, budget)
        else:
            self._news = True  # now it would only give back what was just taken; the next step may
        out.finished_request_ids, self._forget = self._forget, []
        out.ec_metadata = self._ec.build_connector_meta()
        if self._kv_connector is not None:
            out.kv_metadata = self._kv_connector.build_connector_meta()
        return out

    def _schedule_running(self, out: SchedulerOutput, budget: int) -> int:
        i = 0
        while i < len(self._running) and budget > 0:
            request = self._running[i]
            wanted = min(request.num_tokens - request.num_computed_tokens, budget)
            num_tokens, uses = self._items.fit(request, wanted)
            if num_tokens == 0:
                del self._running[i]
                self._park_for_items(request)
                continue
            blocks = self._allocate_or_preempt(request, num_tokens)
            if blocks is None:
                continue  # the request itself was preempted and is gone from the list
            i = self._running.index(request) + 1  # preemption may have shortened the list before it
            self._put(out, request, num_tokens, blocks, uses)
            budget -= num_tokens
        return budget

    def _schedule_waiting(self, out: SchedulerOutput, budget: int) -> None:
        while self._waiting and budget > 0:
            request = self._waiting[0]
            if request.kv is not None:
                if self._order_pull(request) or self._free_others(request):
                    continue
                return
            if request.request_id not in self._known and len(self._known) >= self.settings.max_num_seqs:
                if self._bring_known_forward():
                    continue
                return
            wanted = min(request.num_tokens - request.num_computed_tokens, budget)
            num_tokens, uses = self._items.fit(request, wanted)
            if num_tokens == 0 or (num_tokens < wanted and self._items.is_patient(request)):
                self._waiting.popleft()
                self._park_for_items(request)
                continue
            blocks = self.kv.allocate_slots(request, request.num_computed_tokens + num_tokens)
            if blocks is None:
                if self._free_others(request):
                    continue
                return  # first come, first served: nobody overtakes the one that waits for room
            self._waiting.popleft()
            self._running.append(request)
            if not request.scheduled_s:
                request.scheduled_s = time.time()
                self.stats.observe("stage_queue_seconds", request.scheduled_s - request.arrival_s)
            if request.recomputes:
                request.recomputes = False
                self.stats.count("kv_recomputations_total")
            request.status = RequestStatus.RUNNING
            self._put(out, request, num_tokens, blocks, uses)
            budget -= num_tokens

    def _bring_known_forward(self) -> bool:
        """The runner has no row left for the first waiting request: let one pass that has a row. False if none waits.
        Without this the two would wait for each other, since rows come free only when requests go on."""
        for request in self._waiting:
            if request.request_id in self._known:
                self._waiting.remove(request)
                self._waiting.appendleft(request)
                return True
        return False

    def _put(
        self, out: SchedulerOutput, request: Request, num_tokens: int, new_blocks: list[int], uses: list[ItemUse]
    ) -> None:
        out.num_scheduled_tokens[request.request_id] = num_tokens
        out.item_uses += uses
        if request.request_id in self._known:
            cached: CachedRequestData = out.cached_requests
            cached.request_ids.append(request.request_id)
            cached.new_block_ids.append(new_blocks)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            return
        self._known.add(request.request_id)
        out.new_requests.append(
            NewRequestData(
                request.request_id,
                request.prompt_token_ids,
                list(request.output_token_ids),
                request.features,
                request.sampling,
                list(request.stop_ids),
                list(request.block_ids),
                request.num_computed_tokens,
            )
        )

    # ---- KV blocks ----

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        while True:
            blocks = self.kv.allocate_slots(request, request.num_computed_tokens + num_tokens)
            if blocks is not None:
                return blocks
            victim = self._victim()
            self._preempt(victim)
            if victim is request:
                return None

    def _victim(self) -> Request:
        """Who gives up its blocks: a parked request that holds some, the latest first; else the latest that runs."""
        for request in reversed(self._parked.values()):
            if request.status is RequestStatus.WAITING_FOR_ENCODER_CACHE and request.block_ids:
                return request
        return self._running[-1]

    def _free_others(self, request: Request) -> bool:
        """The first waiting request finds no room while nothing runs that would make some: preempt whoever holds blocks
        without running, the latest first. False where nobody does, or where something runs."""
        if self._running:
            return False
        for other in (*reversed(self._parked.values()), *reversed(self._waiting)):
            pulling = other.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            if other is not request and other.block_ids and not pulling:
                self._preempt(other)
                # It went to the front; the one that was there comes first.
                self._waiting.remove(request)
                self._waiting.appendleft(request)
                return True
        return False

    def _preempt(self, request: Request) -> None:
        self._remove(request)
        self.kv.free(request)
        self._items.let_go(request)
        self._forget_in_runner(request)
        request.num_computed_tokens = 0
        request.recomputes = True
        request.status = RequestStatus.PREEMPTED
        self._waiting.appendleft(request)
        self.stats.count("num_preemptions_total")

    def _order_pull(self, request: Request) -> bool:
        """Park the first waiting request for its remote blocks. False where there is no room for them yet."""
        assert request.kv is not None
        assert self._kv_connector is not None
        try:
            num_tokens = self._kv_connector.get_num_new_matched_tokens(request.kv)
        except TriptychError as error:
            self._waiting.popleft()
            differs = isinstance(error, IncompatibleError)
            kind = ErrorKind.INCOMPATIBLE if differs else ErrorKind.INVALID_REQUEST
            self._end(request, Ended(RequestStatus.FINISHED_ERROR, error_kind=kind, error=str(error)))
            return True
        if num_tokens != request.num_tokens - 1:
            self._waiting.popleft()
            self._end(
                request,
                Ended(
                    RequestStatus.FINISHED_ERROR,
                    error_kind=ErrorKind.INVALID_REQUEST,
                    error=f"the KV handle brings {num_tokens} tokens, the request needs {request.num_tokens - 1}",
                ),
            )
            return True
        if self.kv.allocate_slots(request, num_tokens) is None:
            return False
        self._waiting.popleft()
        self._kv_connector.update_state_after_alloc(request.request_id, request.kv, list(request.block_ids))
        self._park(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
        return True

    # ---- parking ----

    def _park_for_items(self, request: Request) -> None:
        self._park(request, RequestStatus.WAITING_FOR_ENCODER_CACHE)
        self._advance(request)

    def _park(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        request.parked_s = time.time()
        self._parked[request.request_id] = request

    def _unpark(self) -> None:
        """Send on the parked requests that have what they waited for."""
        # Each goes to the front of the queue, so the one that parked first is taken last.
        for request in reversed(list(self._parked.values())):
            if request.status is RequestStatus.WAITING_FOR_ENCODER_CACHE:
                self._advance(request)

    def _advance(self, request: Request) -> None:
        """Send a parked request on, end it as missing, or leave it."""
        can_go_on, missing = self._items.check(request)
        if missing:
            self.stats.count("ec_misses_total", len(missing))
            del self._parked[request.request_id]
            self._end(request, Ended(RequestStatus.FINISHED_ERROR, missing=missing))
        elif can_go_on:
            del self._parked[request.request_id]
            request.status = RequestStatus.WAITING
            self._waiting.appendleft(request)

    # ---- results ----

    def update_from_output(self, out: SchedulerOutput, made: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take a step's results; return what there is to tell."""
        if made.ec is not None:
            self._items.take_output(made.ec, self._parked.values())
            self._news |= bool(made.ec)
        outputs = self.encodes.update(made)
        if made.prepared or made.encoded or outputs:
            self._news = True
        if made.kv is not None:
            self._take_kv_output(made.kv)
            self._news |= bool(made.kv)
        for request_id, num_tokens in out.num_scheduled_tokens.items():
            request = self._requests[request_id]
            request.num_computed_tokens += num_tokens
            self._items.let_go_computed(request)
            token = made.sampled.get(request_id)
            if token is not None:
                self._take_token(request, token)
        self.stats.count("ec_evictions_total", self.cache.num_evictions - self._evictions_counted)
        self._evictions_counted = self.cache.num_evictions
        ready, self._ready_outputs = self._ready_outputs, []
        return outputs + ready

    def _take_token(self, request: Request, token: int) -> None:
        request.output_token_ids.append(token)
        self.stats.count("generation_tokens_total")
        now = time.time()
        if not request.first_token_s:
            request.first_token_s = now
            if request.num_cached_tokens == 0:
                request.spans.append(Span("queue", request.arrival_s, request.scheduled_s, self.settings.where))
                request.spans.append(self._span("prefill", request.scheduled_s))
            if request.num_given_tokens == 0:
                self.stats.observe("time_to_first_token_seconds", now - request.arrival_s)
        ended = self._stops(request, token)
        if ended is None and request.hand_over:
            ended = Ended(RequestStatus.FINISHED_LENGTH)
        if ended is None:
            self._ready_outputs.append(EngineCoreOutput(request.request_id, new_token_ids=[token]))
            return
        num_made = len(request.output_token_ids) - request.num_given_tokens
        if num_made > 1:
            per_token = (now - request.first_token_s) / (num_made - 1)
            self.stats.observe("time_per_output_token_seconds", per_token)
        self.stats.observe("e2e_request_latency_seconds", now - request.arrival_s)
        self._remove(request)
        self._end(request, ended, new_token_ids=[token])

    def _stops(self, request: Request, token: int) -> Ended | None:
        if token in request.stop_ids:
            return Ended(RequestStatus.FINISHED_STOPPED, FinishReason.STOP)
        if request.num_tokens >= request.max_total_tokens:
            return Ended(RequestStatus.FINISHED_LENGTH, FinishReason.LENGTH)
        return None

    def _take_kv_output(self, made: KVConnectorOutput) -> None:
        assert self._kv_connector is not None
        self._kv_connector.update_connector_output(made)
        self.stats.count("kv_transfer_bytes_total", made.bytes_received)
        self.stats.count("kv_leases_expired_total", len(made.expired_sending))
        for seconds in made.seconds_receiving:
            self.stats.observe("kv_transfer_seconds", seconds)
        for request_id in made.finished_sending:
            if self.kv.has_lease(request_id):
                self.kv.end_lease(request_id)
        for request_id in made.finished_recving:
            self._pulled(request_id, "")
        for request_id, reason in made.failed_recving.items():
            self._pulled(request_id, reason)

    def _pulled(self, request_id: str, problem: str) -> None:
        request = self._parked.get(request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return  # as for loads: reported twice
        del self._parked[request_id]
        if request.aborted:
            self._end(request, Ended(RequestStatus.FINISHED_ABORTED), tell=False)
            return
        request.kv = None
        if not problem:
            request.spans.append(self._span("kv_transfer", request.parked_s))
            request.num_computed_tokens = request.num_cached_tokens = request.num_tokens - 1
        else:
            self.stats.count("kv_transfer_failures_total")
            self.kv.free(request)
            if self.settings.kv_load_failure_policy == "fail":
                self._end(
                    request,
                    Ended(
                        RequestStatus.FINISHED_ERROR,
                        error_kind=ErrorKind.UNAVAILABLE,
                        error=f"the KV blocks could not be pulled: {problem}",
                    ),
                )
                return
            request.recomputes = True
        request.status = RequestStatus.WAITING
        self._waiting.appendleft(request)

    # ---- ends ----

    def _remove(self, request: Request) -> None:
        """Take a request out of whichever list it is in."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status in _PARKED:
            del self._parked[request.request_id]
        else:
            self._waiting.remove(request)

    def _end(
        self, request: Request, ended: Ended, *, new_token_ids: list[int] | None = None, tell: bool = True
    ) -> None:
        """The one way out: everything that a request holds is freed here. It must be in no list any more."""
        self._news = True  # what it held may be what others wait for
        request.status = ended.status
        self._items.forget(request)
        if request.hand_over and ended.status is RequestStatus.FINISHED_LENGTH and ended.reason is None:
            assert self._kv_connector is not None
            ended.kv = self._kv_connector.request_finished(
                request.request_id, list(request.block_ids), request.num_computed_tokens
            )
            self.kv.lease(request)
        else:
            self.kv.free(request)
        self._forget_in_runner(request)
        del self._requests[request.request_id]
        if not tell:
            return
        if request.first_token_s and not request.hand_over:
            pulled = request.num_cached_tokens > 0
            request.spans.append(self._span("decode", request.scheduled_s if pulled else request.first_token_s))
        self._ready_outputs.append(
            EngineCoreOutput(
                request.request_id,
                new_token_ids=new_token_ids or [],
                finished=True,
                finish_reason=ended.reason,
                kv=ended.kv,
                missing=ended.missing,
                error_kind=ended.error_kind,
                error=ended.error,
                spans=request.spans,
                usage=Usage(
                    prompt_tokens=request.num_prompt_tokens,
                    completion_tokens=len(request.output_token_ids),
                    cached_tokens=request.num_cached_tokens if request.num_given_tokens == 0 else 0,
                    image_tokens=request.image_tokens,
                ),
            )
        )

    def _forget_in_runner(self, request: Request) -> None:
        if request.request_id in self._known:
            self._known.discard(request.request_id)
            self._forget.append(request.request_id)

    def refuse(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        """End a request that was never taken, in the next step's outputs."""
        self._ready_outputs.append(EngineCoreOutput(request_id, finished=True, error_kind=kind, error=reason))

    def _too_large(self, num_embeds: int) -> str:
        return (
            f"image has {num_embeds} embeddings, the encoder buffer holds {self.cache.num_rows} (--encoder-cache-bytes)"
        )

    def _span(self, name: str, start_s: float, note: str = "") -> Span:
        return Span(name, start_s, time.time(), self.settings.where, note)

    # ---- state ----

    def make_stats(self) -> EngineStats:
        """The state after a step."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._parked) + len(self.encodes),
            kv_blocks_total=self.kv.pool.num_blocks,
            kv_blocks_held=self.kv.pool.num_held,
            kv_leases=self.kv.num_leases,
            encoder_cache_bytes_total=self.cache.num_rows * self.cache.row_bytes,
            encoder_cache_bytes_held=self.cache.bytes_held,
            encoder_cache_items=self.cache.num_items,
            counters=dict(self.stats.counters),
            observations=self.stats.take_observations(),
        )
