"""A bench that keeps the life of each request, and has all of them come by one of three roads."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from core.types import Feature, KVHandle, PlacedFeature
from engine.request import Request, RequestStatus
from engine.scheduler_output import SchedulerOutput
from tests.engine.harness import Bench
from tests.engine.simulated_runner import expected_answer

#: What is zero unless a scenario says otherwise.
FAILURES = (
    "ec_load_failures_total",
    "ec_misses_total",
    "ec_save_failures_total",
    "kv_leases_expired_total",
    "kv_recomputations_total",
    "kv_transfer_failures_total",
    "kv_transfer_retries_total",
    "num_preemptions_total",
)


class Road(enum.Enum):
    """How requests come. The last is the only way of a decode worker to compute a prompt: its blocks did not come."""

    ALONE = "no KV connector"
    HAND_OVER = "prefill, which hands over"
    LOST_PULL = "decode, whose pull fails"


class Ask(NamedTuple):
    """A request. `images`: (key, offset, number of embeddings)."""

    name: str
    prompt: list[int]
    images: list[tuple[str, int, int]]
    max_tokens: int = 4


class Scene(Bench):
    """`lives` has the statuses of each request, as seen after each half of a step, without repeats."""

    def __init__(self, road: Road, **settings: Any) -> None:
        super().__init__(with_kv=road is not Road.ALONE, **settings)
        self.road = road
        self.lives: dict[str, list[RequestStatus]] = {}
        self.requests: dict[str, Request] = {}
        self._expected: dict[str, list[int]] = {}
        self._num_images_encoded = 0

    def ask(self, *asked: Ask) -> None:
        """All at once. A lost pull is over when this returns: nothing of the prompt is computed yet, by any road."""
        for name, prompt, images, max_tokens in asked:
            features = [PlacedFeature(Feature(key, num, (1, 2, 2 * num), 8), offset) for key, offset, num in images]
            answer = expected_answer(prompt, features, max_tokens, [])
            lost = self.road is Road.LOST_PULL
            self.add(
                name,
                len(prompt),
                images,
                prompt=prompt,
                max_tokens=max_tokens,
                hand_over=self.road is Road.HAND_OVER,
                kv=KVHandle("ScriptedPeer", b"", len(prompt)) if lost else None,
                given_tokens=answer[:1] if lost else None,
            )
            self._expected[name] = answer[1:] if lost else answer[:1] if self.road is Road.HAND_OVER else answer
            self.requests[name] = self.scheduler._requests[name]
            self.lives[name] = []
            self._note()
        if self.road is Road.LOST_PULL:
            self.step()
            self.step(pull_failed={name: "lost" for name, *_ in asked})

    def make(self, key: str, num_embeds: int) -> None:
        """What the router does for an item that was named as missing."""
        self._num_images_encoded += 1
        self.encode(f"encode-{self._num_images_encoded}", key, num_embeds, reported_missing=True)

    def begin(self) -> SchedulerOutput:
        out = super().begin()
        self._note()
        return out

    def finish(self, **ended: Any) -> None:
        super().finish(**ended)
        self._note()

    def run(self) -> None:
        """Until every request has ended, and the leases of those that were handed over."""
        self.settle(400)
        while self.leased:
            self.step(sent=list(self.leased))

    def life(self, name: str) -> list[RequestStatus]:
        """From the moment from which it is the same by every road."""
        life = self.lives[name]
        if self.road is not Road.LOST_PULL:
            return life
        assert life[:2] == [RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS]
        return life[2:]

    def counter(self, name: str) -> int:
        return self.scheduler.stats.counters[name]

    def assert_well(self, *missing: str, **counted: int) -> None:
        """After `run`: every answer is right, or ended in `missing`; nothing is held, each end was told to the EC
        connector once, and no failure was counted beyond `counted` and the road's own."""
        self.assert_empty()
        for name, expected in self._expected.items():
            last = self.last(name)
            assert last.finished, name
            assert bool(last.missing) is (name in missing), (name, last)
            assert self.answer(name) == ([] if name in missing else expected), name
        encodes = [f"encode-{i + 1}" for i in range(self._num_images_encoded)]
        assert sorted(self.store.ended) == sorted([*self._expected, *encodes])
        if self.road is Road.LOST_PULL:
            counted["kv_transfer_failures_total"] = len(self._expected)
            ran = [name for name, life in self.lives.items() if RequestStatus.RUNNING in life]
            counted["kv_recomputations_total"] = counted.get("kv_recomputations_total", 0) + len(ran)
        assert {n: self.counter(n) for n in FAILURES} == {n: counted.get(n, 0) for n in FAILURES}

    def _note(self) -> None:
        for name, request in self.requests.items():
            life = self.lives[name]
            if not life or life[-1] is not request.status:
                life.append(request.status)
