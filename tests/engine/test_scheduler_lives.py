"""Random lives of requests, 10,000 steps of them: whatever happens in whichever order, nothing leaks, nothing is in two
hands, budgets are kept, every accepted request ends, and every answer is the one that its prompt and images have.

`Bench.check` looks at blocks and rows in every step; the simulated runner looks at what they hold. Items differ in size
up to the whole buffer, and requests share beginnings that end inside images: among equals nobody waits in a circle. At
its end a life is flooded by others that came later, with which what was there must be through in the end.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from core.types import Feature, KVHandle, PlacedFeature
from tests.engine.harness import Bench
from tests.engine.simulated_runner import VOCABULARY, expected_answer, fingerprints, token_after

KEYS = [f"{i:064x}" for i in range(6)]
Images = list[tuple[int, int]]  # which, and how many tokens stand before it
IMAGES = st.lists(st.tuples(st.integers(0, len(KEYS) - 1), st.integers(0, 3)), max_size=3)


class Lives(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(12, 40),
        buffer_rows=st.integers(2, 20),
        sizes=st.lists(st.integers(1, 20), min_size=len(KEYS), max_size=len(KEYS)),
        shapes=st.lists(IMAGES, min_size=3, max_size=3),
        max_num_seqs=st.sampled_from([1, 1, 2, 3, 5]),
        budget=st.integers(1, 40),
        long_prompt=st.sampled_from([0, 3, 8]),
        overlap=st.booleans(),
        patience_s=st.sampled_from([0.0, 0.0, 0.001]),
        flood=st.sampled_from(["nothing", "nothing", "loads", "one load", "encodes", "both"]),
        at_once=st.sampled_from([1, 100]),
    )
    def start(
        self,
        num_blocks: int,
        buffer_rows: int,
        sizes: list[int],
        shapes: list[Images],
        max_num_seqs: int,
        budget: int,
        long_prompt: int,
        overlap: bool,
        patience_s: float,
        flood: str,
        at_once: int,
    ) -> None:
        self.bench = Bench(
            num_blocks=num_blocks,
            buffer_rows=buffer_rows,
            max_num_seqs=max_num_seqs,
            budget=budget,
            long_prompt=long_prompt,
            with_kv=True,
            patience_s=patience_s,
            max_waiting=1000,
        )
        self.sizes = [min(size, buffer_rows) for size in sizes]
        self.shapes, self.flood, self.at_once = shapes, flood, at_once
        self.bench.store.stored = set(KEYS[:4])
        self.max_in_flight = 2 if overlap else 1
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.num = 0

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(1, 30),
        images=st.one_of(st.integers(0, 2), IMAGES),
        max_tokens=st.integers(1, 9),
        stops=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        kind=st.sampled_from(["generate", "generate", "hand over", "pull", "pull"]),
        tenant=st.sampled_from(["", "other"]),
        priority=st.integers(-1, 1),
    )
    def ask(
        self,
        prefix: int,
        length: int,
        images: int | Images,
        max_tokens: int,
        stops: list[int],
        kind: str,
        tenant: str,
        priority: int,
    ) -> None:
        self.num += 1
        name = f"r{self.num}"
        placed: list[tuple[str, int, int]] = []
        # Prompts share long beginnings, also the same text over other images.
        prompt = [1000 * prefix + i for i in range(length)]
        for which, gap in self.shapes[images] if isinstance(images, int) else images:
            offset = (placed[-1][1] + placed[-1][2] if placed else 0) + gap
            placed.append((KEYS[which], offset, self.sizes[which]))
            prompt += [1000 * prefix + i for i in range(len(prompt), offset + self.sizes[which])]
        prompt = prompt[: self.bench.scheduler.settings.max_model_len - 12]
        placed = [image for image in placed if image[1] + image[2] <= len(prompt)]
        for _, offset, num in placed:
            prompt[offset : offset + num] = [5] * num
        features = [PlacedFeature(Feature(k, n, (1, 2, 2 * n), 8), o) for k, o, n in placed]
        given = []
        if kind == "pull":
            given = [token_after(fingerprints(prompt, features, tenant)[-1])]
            max_tokens += 1
        self.bench.add(
            name,
            len(prompt),
            placed,
            prompt=prompt,
            max_tokens=max_tokens,
            stop=tuple(stops),
            tenant=tenant,
            priority=priority,
            hand_over=kind == "hand over",
            kv=KVHandle("ScriptedPeer", b"", len(prompt)) if given else None,
            given_tokens=given,
        )
        answer = expected_answer([*prompt, *given], features, max_tokens - len(given), stops, tenant)
        self.expected[name] = answer[:1] if kind == "hand over" else answer

    @rule(which=st.integers(0, 5), again=st.booleans())
    def encode(self, which: int, again: bool) -> None:
        self.num += 1
        self.bench.encode(f"e{self.num}", KEYS[which], self.sizes[which], reported_missing=again)

    @rule(number=st.integers(1, 60), which=st.integers(0, 5), what=st.sampled_from(["abort", "lose", "slow", "no"]))
    def disturb(self, number: int, which: int, what: str) -> None:
        """The store drops an item or has it again, finds it slowly or no more so."""
        name = f"r{number}"
        if what == "lose":
            self.bench.store.stored ^= {KEYS[which]}
        elif what == "slow":
            self.bench.store.undecided ^= {KEYS[which]}
        elif what == "abort" and name in self.expected:
            if not any(output.finished for output in self.bench.outputs.get(name, [])):
                self.aborted.add(name)
            self.bench.scheduler.abort(name)

    @rule(
        ends=st.lists(st.booleans(), min_size=4, max_size=8),
        fails=st.lists(st.sampled_from([False, False, False, True]), min_size=4, max_size=8),
    )
    def step(self, ends: list[bool], fails: list[bool]) -> None:
        bench = self.bench
        bench.begin()
        if bench.num_in_flight < self.max_in_flight:
            return

        def some(names: list[str], bad: bool) -> list[str]:
            return [n for i, n in enumerate(names) if ends[i % len(ends)] and fails[i % len(fails)] is bad]

        bench.finish(
            loaded=some(bench.loading, False),
            load_failed=some(bench.loading, True),
            prepared=some(bench.preparing, False),
            saved=some(bench.saving, False),
            save_failed=some(bench.saving, True),
            pulled=some(bench.pulling, False),
            pull_failed=dict.fromkeys(some(bench.pulling, True), "lost"),
            sent=some(bench.leased, False),
        )

    def check_answers(self) -> None:
        for name, outputs in self.bench.outputs.items():
            if name not in self.expected:
                continue
            answer, expected = self.bench.answer(name), self.expected[name]
            assert answer == expected[: len(answer)], name
            last = outputs[-1]
            if last.finished and not last.missing and last.error_kind is None:
                assert answer == expected, name

    def advance(self) -> None:
        """A step, with which things in the background end, so many of each kind."""
        bench, num = self.bench, self.at_once
        bench.begin()
        bench.finish(
            loaded=bench.loading[:num],
            prepared=bench.preparing[:num],
            saved=bench.saving[:num],
            pulled=bench.pulling[:num],
            sent=bench.leased[:num],
        )

    def drown(self) -> None:
        """Others come and come, and rank after all that were there: these end."""
        bench, old = self.bench, self.held()
        bench.store.stored = set(KEYS)
        size = self.sizes[0]
        for i in range(5000):
            held = self.held()
            if not old & held:
                return
            if len(held - old) < 4:
                key = KEYS[0] if self.flood == "one load" else f"{100 + i:064x}"
                if self.flood == "encodes" or (self.flood == "both" and i % 2):
                    bench.encode(f"new-{i}", key, size)
                else:
                    bench.store.stored.add(key)
                    bench.add(f"new-{i}", size + 3, [(key, i % 3, size)], max_tokens=2, priority=1)
            self.advance()
        raise AssertionError(f"{old & self.held()} starve")

    def held(self) -> set[str]:
        scheduler = self.bench.scheduler
        return {*scheduler._requests, *scheduler.encodes._key_of}

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.store.undecided.clear()
        while bench.num_in_flight:
            bench.finish()
        if self.flood != "nothing":
            self.drown()
        for _ in range(5000):  # at a budget of one token a step, long lives take long
            if not bench.scheduler.has_work and not bench.leased:
                break
            self.advance()
        assert not bench.scheduler.has_work, bench.scheduler.make_stats()
        bench.assert_empty()
        self.check_answers()
        for name in self.expected:
            if name not in self.aborted:
                assert bench.last(name).finished, f"{name} was never answered"


Lives.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # to shrink a hundred steps takes longer than to read them
)
test_lives = pytest.mark.timeout(300)(Lives.TestCase)
