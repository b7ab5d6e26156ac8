"""A scheduler with its real managers, a store in memory whose answers a test decides, and a runner that only counts."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

import torch

from connectors.ec.base import (
    BufferSlice,
    ECConnectorBase,
    ECConnectorConfig,
    ECConnectorOutput,
    ECSide,
)
from connectors.kv.base import KVConnectorBase, KVConnectorConfig, KVConnectorOutput, KVLayout, KVSide
from core.types import ECRole, Feature, KVHandle, KVRole, PlacedFeature, SamplingParams
from engine.encoder_cache_manager import EncoderCacheManager
from engine.kv_cache_manager import KVCacheManager
from engine.protocol import EngineCoreOutput, EngineCoreRequest
from engine.scheduler import Scheduler
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine.settings import SchedulerSettings
from tests.engine.simulated_runner import SimulatedRunner

LAYOUT = KVLayout(version=1, model="m" * 64, dtype="float32", num_layers=1, block_size=4, num_kv_heads=1, head_dim=8)


class ScriptedStore(ECConnectorBase):
    """Scheduler side only. `stored` answers look-ups; keys in `undecided` are still being looked up."""

    def __init__(self) -> None:
        config = ECConnectorConfig(ECRole.BOTH, "n" * 64, torch.float32, 8, {}, lambda: None)
        super().__init__(config, ECSide.SCHEDULER)
        self.stored: set[str] = set()
        self.undecided: set[str] = set()
        self.lookups: list[str] = []
        self.sources: dict[str, str] = {}
        self.counters: dict[str, int] = {}
        self.ended: list[str] = []

    def has_cache_item(self, key: str) -> bool | None:
        self.lookups.append(key)
        return None if key in self.undecided else key in self.stored

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        self.stored -= set(output.failed_loading)
        self.stored |= set(output.finished_saving)

    def add_item_source(self, key: str, source: str) -> None:
        assert key not in self.lookups, "the source comes before the first question"
        self.sources[key] = source

    def item_source(self, key: str) -> str:
        assert key in self.stored, "asked before it was told that the item is there"
        return f"from {key[:4]}"

    def take_counters(self) -> dict[str, int]:
        counters, self.counters = self.counters, {}
        return counters

    def request_finished(self, request_id: str) -> None:
        self.ended.append(request_id)

    def start_load_caches(self) -> None: ...

    def save_caches(self, key: str, embeds: torch.Tensor) -> None: ...

    def get_finished(self) -> ECConnectorOutput:
        return ECConnectorOutput()

    def close(self) -> None: ...


class ScriptedPeer(KVConnectorBase):
    """Scheduler side only."""

    def __init__(self) -> None:
        super().__init__(KVConnectorConfig(KVRole.BOTH, LAYOUT, "i", {}, lambda: None), KVSide.SCHEDULER)

    def make_handle(self, request_id: str, block_ids: list[int], num_tokens: int) -> KVHandle:
        return KVHandle("ScriptedPeer", request_id.encode(), num_tokens)

    def register_kv_caches(self, blocks: torch.Tensor) -> None: ...

    def start_load_kv(self) -> None: ...

    def get_finished(self) -> KVConnectorOutput:
        return KVConnectorOutput()

    def num_leases(self) -> int:
        return 0

    def close(self) -> None: ...


class Bench:
    """Steps the scheduler; background work ends when the test says so."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        buffer_rows: int = 32,
        max_num_seqs: int = 8,
        budget: int = 64,
        with_kv: bool = False,
        policy: str = "recompute",
        max_waiting: int = 100,
        patience_s: float = 0.0,
        long_prompt: int = 0,
        aging_s: float = 10.0,
    ) -> None:
        self.store = ScriptedStore()
        self.cache = EncoderCacheManager(buffer_rows, 32)
        self.kv = KVCacheManager(num_blocks, 4)
        self.peer = ScriptedPeer() if with_kv else None
        self.scheduler = Scheduler(
            SchedulerSettings(
                max_model_len=4 * num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_waiting=max_waiting,
                where="test-0",
                kv_load_failure_policy=policy,
                item_patience_s=patience_s,
                long_prefill_token_threshold=long_prompt,
                aging_s=aging_s,
            ),
            self.kv,
            self.cache,
            self.store,
            self.peer,
        )
        self.runner = SimulatedRunner(num_blocks, 4, buffer_rows)
        self.where: dict[str, BufferSlice] = {}  # of items that were ordered
        self.ordered: list[str] = []  # every load so far
        self.pulls: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self._steps: deque[SchedulerOutput] = deque()
        self._num_added = 0
        self.loading: list[str] = []
        self.preparing: list[str] = []
        self.saving: list[str] = []
        self.pulling: list[str] = []
        self.leased: list[str] = []
        self.cancelled: list[str] = []
        self.out = SchedulerOutput()
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(
        self,
        request_id: str,
        num_tokens: int,
        images: list[tuple[str, int, int]] | None = None,
        *,
        max_tokens: int = 4,
        hand_over: bool = False,
        kv: KVHandle | None = None,
        given: int = 0,
        given_tokens: list[int] | None = None,
        source: str = "",
        prompt: list[int] | None = None,
        tenant: str = "",
        priority: int = 0,
        stop: tuple[int, ...] = (),
    ) -> None:
        """A generation. `images`: (key, offset, number of embeddings). Without a `prompt`, one that no other shares."""
        self._num_added += 1
        prompt = prompt or [10_000 * self._num_added + i for i in range(num_tokens)]
        self.runner.salts[request_id] = tenant
        self.prompts[request_id] = prompt
        features = [PlacedFeature(Feature(k, n, (1, 2, 2 * n), 8, source=source), o) for k, o, n in images or []]
        self.scheduler.add_request(
            EngineCoreRequest(
                request_id,
                time.time(),
                prompt_token_ids=prompt,
                features=features,
                sampling=SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop),
                output_token_ids=given_tokens or [1] * given,
                hand_over=hand_over,
                kv=kv,
                tenant=tenant,
                priority=priority,
            )
        )

    def encode(self, request_id: str, key: str, num_embeds: int, *, reported_missing: bool = False) -> None:
        feature = Feature(key, num_embeds, (1, 2, 2 * num_embeds), 8)
        self.scheduler.add_request(
            EngineCoreRequest(request_id, time.time(), image=b"x", feature=feature, reported_missing=reported_missing)
        )

    def begin(self) -> SchedulerOutput:
        """Schedule a step."""
        out = self.out = self.scheduler.schedule()
        self.check(out)
        self._steps.append(out)
        return out

    def finish(
        self,
        *,
        loaded: list[str] | None = None,
        load_failed: list[str] | None = None,
        prepared: list[str] | None = None,
        saved: list[str] | None = None,
        save_failed: list[str] | None = None,
        pulled: list[str] | None = None,
        pull_failed: dict[str, str] | None = None,
        sent: list[str] | None = None,
    ) -> None:
        """Execute the oldest step, begin what it orders in the background, and report what ended there."""
        out = self._steps.popleft()
        assert out.ec_metadata is not None
        for load in out.ec_metadata.loads:
            self.loading.append(load.key)
            self.ordered.append(load.key)
            self.where[load.key] = load.where
            self.runner.buffer[load.where.start : load.where.start + load.where.num_rows] = [None] * load.where.num_rows
        self.preparing += [image.feature.key for image in out.prepare]
        self.saving += [*out.save, *(image.feature.key for image in out.encode)]
        if out.kv_metadata is not None:
            for pull in out.kv_metadata.pulls:
                self.pulling.append(pull.request_id)
                self.pulls[pull.request_id] = pull.block_ids
            self.leased += [lease.request_id for lease in out.kv_metadata.leases]
            self.cancelled += out.kv_metadata.cancels
        for ended, pending in (
            ((loaded or []) + (load_failed or []), self.loading),
            (prepared or [], self.preparing),
            ((saved or []) + (save_failed or []), self.saving),
            ((pulled or []) + list(pull_failed or {}), self.pulling),
            (sent or [], self.leased),
        ):
            pending[:] = [name for name in pending if name not in ended]
        for key in loaded or []:
            if key in self.where:
                self.runner.fill_rows(key, self.where[key].start, self.where[key].num_rows)
        for image in out.encode:
            self.runner.fill_rows(image.feature.key, image.where.start, image.where.num_rows)
        for request_id in pulled or []:
            request = self.scheduler._requests.get(request_id)
            if request is not None:
                tokens = [*request.prompt_token_ids, *request.output_token_ids][:-1]
                self.runner.fill_blocks(tokens, request.features, self.pulls[request_id], request.tenant)
        made = ModelRunnerOutput(
            sampled=self.runner.execute(out),
            prepared=prepared or [],
            encoded={image.feature.key: "" for image in out.encode},
            ec=ECConnectorOutput(
                finished_loading=loaded or [],
                failed_loading=dict.fromkeys(load_failed or [], "vanished"),
                finished_saving=saved or [],
                failed_saving=dict.fromkeys(save_failed or [], "disk full"),
            ),
            kv=KVConnectorOutput(
                finished_recving=pulled or [], failed_recving=pull_failed or {}, finished_sending=sent or []
            )
            if self.peer is not None
            else None,
        )
        for output in self.scheduler.update_from_output(out, made):
            self.outputs.setdefault(output.request_id, []).append(output)

    def step(self, **ended: Any) -> SchedulerOutput:
        """One step, and what ended in the background during it, as `finish` takes it."""
        out = self.begin()
        self.finish(**ended)
        return out

    def check(self, out: SchedulerOutput) -> None:
        """What must hold in every step."""
        scheduler = self.scheduler
        assert out.num_tokens <= scheduler.settings.max_num_batched_tokens
        held = Counter(block for request in scheduler._requests.values() for block in request.block_ids)
        held.update(block for blocks in self.kv._leased.values() for block in blocks)
        pool = self.kv.pool
        assert {block: pool.refs(block) for block in range(pool.num_blocks) if pool.refs(block)} == held
        assert pool.num_held == len(held), "a block is lost, or free and held"
        for request in scheduler._lists.running:  # nobody writes to what others share
            for block in request.block_ids[request.num_executed_tokens // self.kv.block_size :]:
                assert pool.refs(block) == 1, "a block that is written to is in two hands"
        for request in scheduler._lists.waiting:
            assert not request.block_ids, "a request that waits for its first turn holds blocks"
            assert not request.held_items, "a request that waits for its first turn holds items"
        assert len(scheduler._lists.in_runner) <= scheduler.settings.max_num_seqs
        rows = sorted((i.where.start, i.where.num_rows) for i in self.cache._items.values())
        rows += sorted((hole.start, hole.num_rows) for hole in self.cache._free)
        place = 0
        for start, num in sorted(rows):
            assert start == place, "rows of the buffer are lost, or in two hands"
            place = start + num
        assert place == self.cache.num_rows

    def settle(self, max_steps: int = 200) -> None:
        """Step until nothing is left; whatever is in the background ends with the step after."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            while self._steps:
                self.finish()
            loading, self.loading = self.loading, []
            preparing, self.preparing = self.preparing, []
            saving, self.saving = self.saving, []
            pulling, self.pulling = self.pulling, []
            self.step(loaded=loading, prepared=preparing, saved=saving, pulled=pulling)
        raise AssertionError("requests are left")

    def prompt_of(self, request_id: str) -> list[int]:
        return self.prompts[request_id]

    def answer(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.new_token_ids]

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    def tokens(self, request_id: str) -> int:
        return sum(len(output.new_token_ids) for output in self.outputs.get(request_id, []))

    def last(self, request_id: str) -> EngineCoreOutput:
        return self.outputs[request_id][-1]

    def assert_empty(self) -> None:
        """Nothing is held once all requests have ended."""
        stats = self.scheduler.make_stats()
        counts = (stats.num_running, stats.num_waiting, stats.kv_blocks_held, stats.kv_leases)
        assert counts == (0, 0, 0, 0), counts
        held = {key[-4:]: item for key, item in self.cache._items.items() if item.holders or not item.ready}
        assert not held, held
        assert stats.encoder_cache_bytes_held == 0
