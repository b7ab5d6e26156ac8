"""Decides, step by step, which tokens of which requests are computed.

One token budget, no separate prefill and decode modes: a request has tokens that are known (prompt, and output so far)
and tokens that are computed, and a step closes some of the gap. Three phases: running requests, waiting ones, and the
output that the runner acts on. The design is vLLM V1's (`v1/core/sched/scheduler.py`).

What keeps a request from running does not block the others: it is *parked*, WAITING_FOR_ENCODER_CACHE while an item of
its is looked up or loaded, WAITING_FOR_REMOTE_KVS while its blocks are pulled. A new request waits a moment for its
items, since a load is usually over before a step would be, and a step reads all weights however few tokens it
computes; after that it is computed as far as its first absent item. Items whose look-up says no are named to the
caller (`missing`), and the request ends.

Holding things cannot deadlock, nor can two requests take from each other for ever, since everything is taken along one
order, the rank: level, then turn. An *idle* request, one that had its turn and does not run, holds KV blocks, a row in
the runner, the item that it needs next and what a step under way reads. That all go on in the end:

1. What runs goes on, parks or ends; loads, pulls, saves, leases and look-ups end by themselves. So what these hold
   comes free, and it is enough to look at idle requests while nothing runs.
2. The first of them in rank, and then each, gets what it lacks: blocks and rows from those that rank after it and are
   idle (preemption: recompute later, hence only while nothing runs), items at once. One with a row may pass another
   that has none, and only while it can: where it finds no blocks, the first takes a row.
3. An image to encode needs nothing but rows of the buffer. Of idle requests all but the first give theirs up for it;
   that one goes on by 2, or waits for an image itself and holds nothing. Images are taken in the order in which they
   came, so the one that a request waits for gets there.
4. Where both images and loads lack rows, they have them by turns, and who is not at turn takes none
   (`room_claims.py`). Who ranks after a request that waits for an image does not claim the requests' turn, since it may
   wait for that one, and so for the image. Where the one at turn finds no rows for long, new requests with items wait.

A step may be scheduled while the one before it still runs. A request's `num_computed_tokens` is therefore what will be
in the cache once all scheduled steps have run, its `num_executed_tokens` what is there; `num_pending` tokens will be
sampled by steps under way, and the next step computes them without knowing them: the runner does. What depends on the
tokens (stop tokens, names of full blocks) or on memory that a running step reads (items) waits for the step's output.

Who stands where, and the order, is in `request_lists.py`; that of waiting requests in `request_queue.py`; what touches
only the encoder buffer in `item_gate.py`, only the KV connector in `kv_gate.py`; images to encode in `encode_queue.py`;
what is told in `request_outputs.py`. Still more than 400 lines: the phases, preemption and the ends of requests are
one thing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from connectors.ec.base import ECConnectorBase
from connectors.kv.base import KVConnectorBase
from core.types import FinishReason, KVHandle
from engine.encode_queue import EncodeQueue
from engine.encoder_cache_manager import EncoderCacheManager
from engine.item_gate import ItemGate
from engine.kv_cache_manager import KVCacheManager
from engine.kv_gate import KVGate, Pulled
from engine.protocol import EngineCoreOutput, EngineCoreRequest, EngineStats, ErrorKind
from engine.request import Ended, Request, RequestStatus
from engine.request_lists import RequestLists
from engine.request_outputs import RequestOutputs
from engine.scheduler_output import ItemUse, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.settings import SchedulerSettings
from engine.stats import StatsCollector
from engine.turnover import Turnover


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
        self._kv_gate = KVGate(kv, kv_connector, self.stats)
        self._lists = RequestLists(settings)
        self.encodes = EncodeQueue(
            cache,
            ec_connector,
            self.stats,
            max_batched_embeds=settings.max_num_batched_tokens,
            where=settings.where,
        )
        self._items = ItemGate(
            cache,
            ec_connector,
            self.encodes,
            self.stats,
            settings,
            self._lists,
        )
        self._outputs = RequestOutputs(self.stats, settings.where)
        self._turnover = Turnover()
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[list[tuple[Request, int, int]]] = deque()  # steps: request, its preemptions, tokens
        self._news = False  # whether the next step may do what the last could not
        self._num_partial = 0  # prompts that run and were not scheduled to their end
        self._evictions_counted = 0
        self.num_ec_leases = 0  # items that consumers may still pull from this engine, as of the last step

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
            or self._outputs
            or self._lists.has_dropped
            or self._in_flight
            or self._items.is_loading
            or self._kv_gate.has_orders
        )

    @property
    def can_step(self) -> bool:
        """Whether the next step may bring something, as against wait for a look-up, a load, a pull or a lease's end.
        Waiting requests alone are no reason: the last step has found no room for them."""
        return bool(self._lists.running or self._outputs or self._news)

    def add_request(self, made: EngineCoreRequest) -> None:
        """Take a request. One that cannot be served ends with an error in the next step's outputs."""
        self._news = True
        if made.request_id in self._requests or self.kv.has_lease(made.request_id) or made.request_id in self.encodes:
            self.refuse(made.request_id, ErrorKind.INVALID_REQUEST, f"request id {made.request_id} is in use")
            return
        if self.num_requests >= self.settings.max_waiting:
            reason = f"{self.num_requests} requests are held, the limit"
            self._outputs.refuse(made.request_id, ErrorKind.OVERLOADED, reason, self._turnover.next_end_s())
            return
        if made.image is not None and made.feature is not None:
            if made.feature.num_embeds > self.cache.num_rows:
                self.refuse(made.request_id, ErrorKind.INVALID_REQUEST, self._too_large(made.feature.num_embeds))
            else:
                self._turnover.came()
                self.encodes.add(made)
            return
        if objection := self._kv_gate.objection(made):
            self.refuse(made.request_id, ErrorKind.INCOMPATIBLE, objection)
            return
        request = Request.from_core(made, self.settings.max_model_len)
        request.added_s = time.monotonic()
        for placed in request.features:
            if placed.feature.num_embeds > self.cache.num_rows:
                self.refuse(made.request_id, ErrorKind.INVALID_REQUEST, self._too_large(placed.feature.num_embeds))
                return
        self._items.add_sources(request)
        if request.kv is None and request.features:
            # What is found here may be gone by the time of its turn, and then the items are looked up after all.
            num_computed = len(self.kv.get_computed_blocks(request)) * self.kv.block_size
            self._items.look_ahead(request, num_computed)
        self._turnover.came()
        self._requests[request.request_id] = request
        self._lists.wait(request)
        self._kv_gate.expect(request)
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
            if not request.aborted:
                self._kv_gate.cancel(request)
                request.aborted = True
            return
        self._lists.remove(request)
        self._end(request, Ended(RequestStatus.FINISHED_ABORTED), tell=False)

    def release(self, request_id: str) -> None:
        """The router gave up the handle of a finished prefill. Unknown ids are ignored."""
        self._kv_gate.release(request_id)

    def refuse(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        """End a request that was never taken, in the next step's outputs."""
        self._outputs.refuse(request_id, kind, reason)

    # ---- phase one to three ----

    def schedule(self) -> SchedulerOutput:
        """This step's work. The runner must execute the steps in this order, and `update_from_output` must follow for
        each, in the same order; one step may be scheduled before the output of the last is there."""
        out = SchedulerOutput()
        self._in_flight.append([])
        self._news = False
        self._items.begin_step()
        self._outputs.add(self.encodes.schedule(out, self._items.make_room_to_encode))
        self._unpark()
        preemptions = self.stats.counters["num_preemptions_total"]
        budget = self._schedule_running(out, self.settings.max_num_batched_tokens)
        if self.stats.counters["num_preemptions_total"] == preemptions:
            self._schedule_waiting(out, budget)
        else:
            self._news = True  # now it would only give back what was just taken; the next step may
        self._news |= self._items.end_step()
        out.finished_request_ids = self._lists.take_dropped()
        out.ec_metadata = self._ec.build_connector_meta()
        out.kv_metadata = self._kv_gate.build_meta()
        return out

    def _schedule_running(self, out: SchedulerOutput, budget: int) -> int:
        self._num_partial = 0
        longest = self._longest_chunk()
        block_size, running = self.kv.block_size, self._lists.running
        i = 0
        while i < len(running) and budget > 0:
            request = running[i]
            computed = request.num_computed_tokens
            known = request.num_tokens
            wanted = known + request.num_pending - computed
            if wanted <= 0 or (
                request.num_pending and (request.hand_over or known + request.num_pending >= request.max_total_tokens)
            ):
                i += 1  # it ends with a token that is being sampled
                continue
            num_tokens = min(wanted, longest, budget)
            uses: list[ItemUse] = []
            if computed < request.items_end:
                num_tokens, uses = self._items.fit(request, num_tokens)
                if num_tokens == 0:
                    del running[i]
                    self._park_for_items(request)
                    continue
            blocks: list[int] = []
            if computed + num_tokens > len(request.block_ids) * block_size:
                made = self._allocate_or_preempt(request, num_tokens)
                if made is None:
                    continue  # the request itself was preempted and is gone from the list
                blocks = made
            i += 1
            self._num_partial += num_tokens < wanted
            self._put(out, request, num_tokens, blocks, uses)
            budget -= num_tokens
        return budget

    def _schedule_waiting(self, out: SchedulerOutput, budget: int) -> None:
        longest = self._longest_chunk()
        lists = self._lists
        while budget > 0:
            request = lists.next_waiting()
            if request is None:
                return
            if request.kv is not None:
                if len(lists.parked) >= self.settings.max_parked:
                    return
                if self._order_pull(request, request.kv) or self._free_others(request):
                    continue
                return
            if request.request_id not in lists.in_runner and not lists.has_row:
                if request in lists.resuming and self._free_row(request):
                    continue
                return
            if not request.block_ids:
                request.num_computed_tokens = request.num_executed_tokens = self.kv.take_computed_blocks(request)
            if request not in lists.resuming and self._items.holds_off(request):
                self._put_back(request)
                return
            wanted = request.num_tokens - request.num_computed_tokens
            num_tokens, uses = self._items.fit(request, min(wanted, longest, budget))
            if num_tokens == 0 or (num_tokens < min(wanted, longest, budget) and self._items.is_patient(request)):
                if len(lists.parked) >= self.settings.max_parked:
                    self._put_back(request)
                    return
                lists.remove(request)
                self._park_for_items(request)
                continue
            is_partial = num_tokens < wanted
            if is_partial and lists.running and self._num_partial >= self.settings.max_num_partial_prefills:
                self._put_back(request)
                return
            blocks = self.kv.allocate_slots(request, request.num_computed_tokens + num_tokens)
            if blocks is None:
                self._put_back(request)
                if self._free_others(request) or self._free_row_for_first():
                    continue
                return  # nobody overtakes the one that waits for room
            lists.run(request)
            self._num_partial += is_partial
            if not request.scheduled_s:
                self._outputs.scheduled(request)
                if not request.pulled:
                    request.num_cached_tokens = request.num_computed_tokens
                    self.stats.count("prefix_cache_queries_total", request.num_tokens)
                    self.stats.count("prefix_cache_hits_total", request.num_cached_tokens)
            if request.recomputes:
                request.recomputes = False
                self.stats.count("kv_recomputations_total")
            self._put(out, request, num_tokens, blocks, uses)
            budget -= num_tokens

    def _longest_chunk(self) -> int:
        """Most tokens of one request in this step: while others decode, a long prompt must not make them wait long."""
        limit = self.settings.long_prefill_token_threshold
        if limit and any(r.num_tokens + r.num_pending - r.num_computed_tokens <= 1 for r in self._lists.running):
            return limit
        return self.settings.max_num_batched_tokens

    def _put_back(self, request: Request) -> None:
        """It stays where it was. One that had no turn yet is to hold nothing while it waits."""
        if request not in self._lists.resuming:
            self.kv.free(request)
            request.num_computed_tokens = request.num_executed_tokens = 0
            self._items.let_go(request)

    def _put(
        self, out: SchedulerOutput, request: Request, num_tokens: int, new_blocks: list[int], uses: list[ItemUse]
    ) -> None:
        request_id = request.request_id
        out.num_scheduled_tokens[request_id] = num_tokens
        self._in_flight[-1].append((request, request.preemptions, num_tokens))
        if uses:
            out.item_uses += uses
        if request_id in self._lists.in_runner:
            cached = out.cached_requests
            cached.request_ids.append(request_id)
            cached.new_block_ids.append(new_blocks)
            cached.num_computed_tokens.append(request.num_computed_tokens)
        else:
            self._lists.in_runner.add(request_id)
            out.new_requests.append(
                NewRequestData(
                    request_id,
                    request.prompt_token_ids,
                    list(request.output_token_ids),
                    request.features,
                    request.sampling,
                    list(request.stop_ids),
                    list(request.block_ids),
                    request.num_computed_tokens,
                )
            )
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens + request.num_pending:
            request.num_pending += 1

    # ---- KV blocks ----

    def _allocate_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        while True:
            blocks = self.kv.allocate_slots(request, request.num_computed_tokens + num_tokens)
            if blocks is not None:
                return blocks
            victim = self._victim(request)
            self._preempt(victim)
            if victim is request:
                return None

    def _victim(self, request: Request) -> Request:
        """Who gives up its blocks for one that runs: of those that rank after it, one that does not run; else the last
        that runs, which may be the request itself. That one has not been scheduled in this step, since the list is
        gone through by rank."""
        return next((other for other in self._lists.idle_after(request) if other.block_ids), self._lists.running[-1])

    def _free_others(self, request: Request) -> bool:
        """The first waiting request finds no blocks while nothing runs that would free some: preempt one that ranks
        after it. False where nobody does, or where something runs."""
        return self._preempt_one(other for other in self._lists.idle_after(request) if other.block_ids)

    def _free_row(self, request: Request) -> bool:
        """As `_free_others`, for a row in the runner."""
        lists = self._lists
        return self._preempt_one(o for o in lists.idle_after(request) if o.request_id in lists.in_runner)

    def _free_row_for_first(self) -> bool:
        """One that was let past the first, since it has a row, can go no further."""
        lists = self._lists
        if lists.has_row or not lists.resuming or lists.resuming[0].request_id in lists.in_runner:
            return False
        return self._free_row(lists.resuming[0])

    def _preempt_one(self, others: Iterator[Request]) -> bool:
        victim = None if self._lists.running else next(others, None)
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _preempt(self, request: Request) -> None:
        self._lists.remove(request)
        self.kv.free(request)
        self._items.let_go(request)
        self._lists.drop_from_runner(request)
        request.preemptions += 1
        request.num_computed_tokens = request.num_executed_tokens = request.num_pending = 0
        request.recomputes = bool(request.scheduled_s)
        request.status = RequestStatus.PREEMPTED
        self._lists.wait(request)
        self.stats.count("num_preemptions_total")

    def _order_pull(self, request: Request, kv: KVHandle) -> bool:
        """Park a waiting request for its remote blocks. False where there is no room for them yet."""
        num_tokens = self._kv_gate.num_tokens_of(kv, request)
        if isinstance(num_tokens, Ended):
            self._lists.remove(request)
            self._end(request, num_tokens)
            return True
        if self.kv.allocate_slots(request, num_tokens) is None:
            return False
        self._lists.remove(request)
        self._kv_gate.order(kv, request)
        self._lists.park(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
        return True

    # ---- parking ----

    def _park_for_items(self, request: Request) -> None:
        self._lists.park(request, RequestStatus.WAITING_FOR_ENCODER_CACHE)
        self._advance(request)

    def _unpark(self) -> None:
        """Send on the parked requests that have what they waited for."""
        for request in self._lists.parked_for_items():
            self._advance(request)

    def _advance(self, request: Request) -> None:
        """Send a parked request on, end it as missing, or leave it."""
        can_go_on, missing = self._items.check(request)
        if missing:
            self.stats.count("ec_misses_total", len(missing))
            self._lists.remove(request)
            self._end(request, Ended(RequestStatus.FINISHED_ERROR, missing=missing))
        elif can_go_on:
            self._lists.resume(request)

    # ---- results ----

    def update_from_output(self, out: SchedulerOutput, made: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take a step's results; return what there is to tell. `out` is the oldest step without results."""
        if made.ec is not None:
            self._items.take_output(made.ec, self._lists.parked.values())
            self.num_ec_leases = made.ec.num_leased
            self._news |= bool(made.ec)
        outputs = self.encodes.update(made)
        if made.prepared or made.encoded or outputs:
            self._news = True
        if made.kv is not None:
            for pulled in self._kv_gate.take_output(made.kv):
                self._take_pulled(pulled)
            self._news |= bool(made.kv)
        block_size, sampled = self.kv.block_size, made.sampled
        for request, preemptions, num_tokens in self._in_flight.popleft():
            if request.status.finished:
                continue  # it ended while this step ran: nobody wants what it brought
            is_current = request.preemptions == preemptions
            if is_current:
                request.num_executed_tokens += num_tokens
                if request.held_items:
                    self._items.let_go_computed(request)
                if request.num_executed_tokens >= (request.num_known_blocks + 1) * block_size:
                    self.kv.cache_blocks(request, request.num_executed_tokens)
            token = sampled.get(request.request_id)
            if token is not None:
                if is_current:
                    request.num_pending -= 1
                self._take_token(request, token)
        self.stats.count("ec_evictions_total", self.cache.num_evictions - self._evictions_counted)
        self._evictions_counted = self.cache.num_evictions
        self._turnover.note(self.num_requests)
        return outputs + self._outputs.take()

    def _take_token(self, request: Request, token: int) -> None:
        request.output_token_ids.append(token)
        self.stats.count("generation_tokens_total")
        if not request.first_token_s:
            self._outputs.first_token(request)
        if token in request.stop_ids:
            ended = Ended(RequestStatus.FINISHED_STOPPED, FinishReason.STOP)
        elif request.num_tokens >= request.max_total_tokens:
            ended = Ended(RequestStatus.FINISHED_LENGTH, FinishReason.LENGTH)
        elif request.hand_over:
            ended = Ended(RequestStatus.FINISHED_LENGTH)
        else:
            self._outputs.token(request, token)
            return
        self._outputs.last_token(request)
        self._lists.remove(request)
        self._end(request, ended, new_token_ids=[token])

    def _take_pulled(self, pulled: Pulled) -> None:
        request = self._lists.parked.get(pulled.request_id)
        if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return  # as for loads: reported twice
        request.kv = None
        if not pulled.problem and not request.aborted:
            request.spans.append(self._outputs.span("kv_transfer", request.parked_s, pulled.road))
            request.pulled = True
            num_tokens = request.num_tokens - 1
            request.num_computed_tokens = request.num_executed_tokens = request.num_cached_tokens = num_tokens
            self.kv.cache_blocks(request, num_tokens)
            self._lists.resume(request)
            return
        self._lists.remove(request)
        if request.aborted:
            self._end(request, Ended(RequestStatus.FINISHED_ABORTED), tell=False)
            return
        ended = Ended(RequestStatus.FINISHED_ERROR, error_kind=ErrorKind.UNAVAILABLE, error=pulled.problem)
        if pulled.given_up:  # its own cancel is on the way, or lost: nobody reads what this request would say
            self._end(request, ended)
            return
        self.stats.count("kv_transfer_failures_total")
        self.kv.free(request)
        if self.settings.kv_load_failure_policy == "fail":
            ended.error = f"the KV blocks could not be pulled: {pulled.problem}"
            self._end(request, ended)
            return
        request.recomputes = True
        request.status = RequestStatus.WAITING
        self._lists.wait(request)

    # ---- ends ----

    def _end(
        self, request: Request, ended: Ended, *, new_token_ids: list[int] | None = None, tell: bool = True
    ) -> None:
        """The one way out: everything that a request holds is freed here. It must be in no list any more."""
        self._news = True  # what it held may be what others wait for
        request.status = ended.status
        self._items.forget(request)
        if request.kv is not None:
            self._kv_gate.cancel(request)  # its blocks were not pulled, and will not be
        if request.hand_over and ended.status is RequestStatus.FINISHED_LENGTH and ended.reason is None:
            ended.kv = self._kv_gate.lease(request)
        else:
            self.kv.free(request)
        self._lists.drop_from_runner(request)
        del self._requests[request.request_id]
        if tell:
            self._outputs.end(request, ended, new_token_ids or [])

    def _too_large(self, num_embeds: int) -> str:
        return (
            f"image has {num_embeds} embeddings, the encoder buffer holds {self.cache.num_rows} (--encoder-cache-bytes)"
        )

    # ---- state ----

    def make_stats(self) -> EngineStats:
        """The state after a step."""
        return EngineStats(
            num_running=len(self._lists.running),
            num_waiting=self._lists.num_waiting + len(self.encodes),
            kv_blocks_total=self.kv.pool.num_blocks,
            kv_blocks_held=self.kv.pool.num_held,
            kv_leases=self.kv.num_leases,
            encoder_cache_bytes_total=self.cache.num_rows * self.cache.row_bytes,
            encoder_cache_bytes_held=self.cache.bytes_held,
            encoder_cache_items=self.cache.num_items,
            counters=dict(self.stats.counters),
            observations=self.stats.take_observations(),
            ec_leases=self.num_ec_leases,
        )
