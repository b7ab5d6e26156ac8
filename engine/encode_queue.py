"""Images on their way through the vision tower and into the store.

One job an item, however many requests wait for it: equal images are looked up, prepared, encoded and stored once.

    LOOKING ──present──▶ done (cached)
       │ absent, and not in the buffer          absent, but in the buffer
       ▼                                              │
    PREPARING ─▶ PREPARED ─▶ ENCODING ─────────────▶ SAVING ─▶ done

A job whose last waiter leaves is dropped, unless the tower or the store is at it already: then it is finished for
whoever comes next.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from connectors.ec.base import ECConnectorBase, ECConnectorOutput
from core.types import Feature, Span
from engine.encoder_cache_manager import EncoderCacheManager
from engine.protocol import EngineCoreOutput, EngineCoreRequest, ErrorKind
from engine.scheduler_output import ImageToEncode, ImageToPrepare, ModelRunnerOutput, SchedulerOutput
from engine.stats import StatsCollector

_SAVE = "save"
#: Images are prepared ahead of the tower for this many of its steps: pixels are many times as large as the files, and a
#: burst of images must not be held as pixels all at once.
_AHEAD_STEPS = 4


class _State(enum.Enum):
    LOOKING = enum.auto()
    PREPARING = enum.auto()
    PREPARED = enum.auto()
    ENCODING = enum.auto()
    SAVING = enum.auto()


@dataclass(slots=True, eq=False)
class _Job:
    feature: Feature
    image: bytes
    arrival_s: float
    state: _State = _State.LOOKING
    waiters: list[str] = field(default_factory=list)
    tower_ran: bool = False
    is_missed: bool = False  # somebody could not load it: the store may list what it has not got, or cannot give
    spans: list[Span] = field(default_factory=list)
    since_s: float = 0.0  # when the present state began


class EncodeQueue:
    """Part of the scheduler of an engine that holds a vision tower. Step thread only."""

    def __init__(
        self,
        cache: EncoderCacheManager,
        connector: ECConnectorBase,
        stats: StatsCollector,
        *,
        max_batched_embeds: int,
        where: str,
    ) -> None:
        self._cache = cache
        self._connector = connector
        self._stats = stats
        self._max_batched_embeds = max_batched_embeds
        self._where = where
        self._jobs: dict[str, _Job] = {}  # by item key, oldest first
        self._key_of: dict[str, str] = {}  # request id -> item key
        self._forget: list[str] = []

    def __len__(self) -> int:
        return len(self._key_of)

    @property
    def num_unfinished_jobs(self) -> int:
        """Jobs with and without waiters; the engine has work while there are any."""
        return len(self._jobs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._key_of

    def makes(self, key: str) -> bool:
        """Whether the item is on its way."""
        return key in self._jobs

    def add(self, request: EngineCoreRequest) -> None:
        """Take an image. The caller has checked that it fits the buffer."""
        assert request.image is not None
        assert request.feature is not None
        key = request.feature.key
        job = self._jobs.get(key)
        if job is None:
            job = _Job(request.feature, request.image, request.arrival_s, since_s=time.time())
            self._jobs[key] = job
        if request.reported_missing and job.state is _State.LOOKING:
            job.is_missed = True
            self._connector.update_connector_output(ECConnectorOutput(failed_loading={key: "reported missing"}))
        job.waiters.append(request.request_id)
        self._key_of[request.request_id] = key

    def abort(self, request_id: str) -> bool:
        """Drop a waiter. False where the id is not one."""
        key = self._key_of.pop(request_id, None)
        if key is None:
            return False
        self._connector.request_finished(request_id)
        job = self._jobs[key]
        job.waiters.remove(request_id)
        if not job.waiters and job.state in (_State.LOOKING, _State.PREPARING, _State.PREPARED):
            if job.state is not _State.LOOKING:
                self._forget.append(key)
            del self._jobs[key]
        return True

    def schedule(self, out: SchedulerOutput, make_room: Callable[[int], bool]) -> list[EngineCoreOutput]:
        """Add this step's images to `out`; return the requests whose item turned out to be stored already.
        `make_room` says whether the buffer has so many rows for the next image."""
        done: list[EngineCoreOutput] = []
        budget = self._max_batched_embeds
        ahead = sum(
            job.feature.num_embeds for job in self._jobs.values() if job.state in (_State.PREPARING, _State.PREPARED)
        )
        room = True
        out.forget_prepared, self._forget = self._forget, []
        for key, job in list(self._jobs.items()):
            if job.state is _State.LOOKING:
                present = False if job.is_missed else self._connector.has_cache_item(key)
                if present is None:
                    continue
                if present:
                    self._stats.count("ec_hits_total")
                    job.spans.append(self._span("encode", job.arrival_s, "cached"))
                    done += self._finish(key)
                elif self._cache.is_ready(key):
                    self._cache.hold(key, _SAVE)
                    out.save[key] = self._cache.where(key)
                    self._enter(job, _State.SAVING)
                elif not self._cache.is_filling(key) and ahead < _AHEAD_STEPS * self._max_batched_embeds:
                    ahead += job.feature.num_embeds
                    self._stats.count("ec_misses_total")
                    out.prepare.append(ImageToPrepare(job.feature, job.image))
                    self._enter(job, _State.PREPARING)
            elif job.state is _State.PREPARED:
                # At least one image a step, however large; then as many as the budget takes.
                rows = job.feature.num_embeds
                if not room or (out.encode and rows > budget):
                    continue
                where = self._cache.allocate(key, rows) if make_room(rows) else None
                if where is None:
                    room = False  # smaller ones that came later must not take the rows that this one waits for
                    continue
                budget -= rows
                job.spans.append(self._span("queue", job.arrival_s, ""))
                self._observe("stage_queue_seconds", job)
                out.encode.append(ImageToEncode(job.feature, where))
                self._enter(job, _State.ENCODING)
        return done

    def update(self, made: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take a step's results; return the requests that they end."""
        done: list[EngineCoreOutput] = []
        for key in made.prepared:
            if (job := self._jobs.get(key)) is not None and job.state is _State.PREPARING:
                self._enter(job, _State.PREPARED)
        for key, reason in made.failed_prepare.items():
            if key in self._jobs:
                done += self._fail(key, ErrorKind.INVALID_REQUEST, reason)
        for key, problem in made.encoded.items():
            job = self._jobs[key]
            if problem:
                self._cache.drop(key)
                done += self._fail(key, ErrorKind.INTERNAL, problem)
                continue
            self._stats.count("vision_tower_images_total")
            job.tower_ran = True
            job.spans.append(self._span("encode", job.since_s, f"{job.feature.num_embeds} embeddings"))
            self._cache.set_ready(key)
            self._cache.hold(key, _SAVE)
            self._enter(job, _State.SAVING)
        if made.ec is not None:
            saving = {key for key, job in self._jobs.items() if job.state is _State.SAVING}
            for key in saving.intersection(made.ec.finished_saving):
                self._cache.let_go(key, _SAVE)
                job = self._jobs[key]
                job.spans.append(self._span("ec_save", job.since_s, ""))
                done += self._finish(key)
            for key in saving.intersection(made.ec.failed_saving):
                self._cache.let_go(key, _SAVE)
                self._stats.count("ec_save_failures_total")
                reason = f"the encoder cache was not written: {made.ec.failed_saving[key]}"
                done += self._fail(key, ErrorKind.UNAVAILABLE, reason)
        return done

    def _enter(self, job: _Job, state: _State) -> None:
        job.state = state
        job.since_s = time.time()

    def _span(self, name: str, start_s: float, note: str) -> Span:
        return Span(name, start_s, time.time(), self._where, note)

    def _observe(self, name: str, job: _Job) -> None:
        # Wall-clock times: they may be set back in between.
        self._stats.observe(name, max(0.0, time.time() - job.arrival_s))

    def _finish(self, key: str) -> list[EngineCoreOutput]:
        self._observe("e2e_request_latency_seconds", self._jobs[key])
        source = self._connector.item_source(key)
        return self._end(
            key,
            lambda job, i: EngineCoreOutput(
                job.waiters[i],
                finished=True,
                encoded_cached=i > 0 or not job.tower_ran,
                spans=job.spans,
                item_source=source,
            ),
        )

    def _fail(self, key: str, kind: ErrorKind, reason: str) -> list[EngineCoreOutput]:
        return self._end(
            key, lambda job, i: EngineCoreOutput(job.waiters[i], finished=True, error_kind=kind, error=reason)
        )

    def _end(self, key: str, output: Callable[[_Job, int], EngineCoreOutput]) -> list[EngineCoreOutput]:
        job = self._jobs.pop(key)
        for request_id in job.waiters:
            del self._key_of[request_id]
            self._connector.request_finished(request_id)
        return [output(job, i) for i in range(len(job.waiters))]
