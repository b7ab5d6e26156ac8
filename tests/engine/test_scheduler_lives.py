"""Random lives of requests, 10,000 steps of them: whatever happens in whichever order, nothing leaks, nothing is in two
hands, budgets are kept, every accepted request ends, and every answer is the one that its prompt and images have.

`Bench.check` looks at blocks and rows in every step; the simulated runner looks at what they hold.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from core.types import Feature, KVHandle, PlacedFeature
from tests.engine.harness import Bench
from tests.engine.simulated_runner import VOCABULARY, expected_answer, fingerprints, token_after

KEYS = [f"{i:064x}" for i in range(6)]
NUM_EMBEDS = 4


class Lives(RuleBasedStateMachine):
    names = Bundle("names")

    @initialize(
        num_blocks=st.integers(12, 40),
        buffer_rows=st.integers(NUM_EMBEDS, 20),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 40),
        long_prompt=st.sampled_from([0, 3, 8]),
        overlap=st.booleans(),
        patience_s=st.sampled_from([0.0, 0.001]),
    )
    def start(
        self,
        num_blocks: int,
        buffer_rows: int,
        max_num_seqs: int,
        budget: int,
        long_prompt: int,
        overlap: bool,
        patience_s: float,
    ) -> None:
        self.bench = Bench(
            num_blocks=num_blocks,
            buffer_rows=buffer_rows,
            max_num_seqs=max_num_seqs,
            budget=budget,
            long_prompt=long_prompt,
            with_kv=True,
            patience_s=patience_s,
        )
        self.bench.store.stored = set(KEYS[:4])
        self.max_in_flight = 2 if overlap else 1
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.num = 0

    @rule(
        target=names,
        prefix=st.integers(0, 2),
        length=st.integers(1, 30),
        images=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=3),
        max_tokens=st.integers(1, 9),
        stops=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        kind=st.sampled_from(["generate", "generate", "hand over", "pull"]),
        tenant=st.sampled_from(["", "other"]),
        priority=st.integers(-1, 1),
    )
    def ask(
        self,
        prefix: int,
        length: int,
        images: list[tuple[int, int]],
        max_tokens: int,
        stops: list[int],
        kind: str,
        tenant: str,
        priority: int,
    ) -> str:
        self.num += 1
        name = f"r{self.num}"
        placed: list[tuple[str, int, int]] = []
        # Prompts share long beginnings, also the same text over other images.
        prompt = [1000 * prefix + i for i in range(length)]
        for which, gap in images:
            offset = (placed[-1][1] + NUM_EMBEDS if placed else 0) + gap
            placed.append((KEYS[which], offset, NUM_EMBEDS))
            prompt += [5] * max(0, offset + NUM_EMBEDS - len(prompt))
        prompt = prompt[: self.bench.scheduler.settings.max_model_len - 12]
        placed = [image for image in placed if image[1] + NUM_EMBEDS <= len(prompt)]
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
        return name

    @rule(which=st.integers(0, 5), again=st.booleans())
    def encode(self, which: int, again: bool) -> None:
        self.num += 1
        self.bench.encode(f"e{self.num}", KEYS[which], NUM_EMBEDS, reported_missing=again)

    @rule(name=names)
    def abort(self, name: str) -> None:
        if not any(output.finished for output in self.bench.outputs.get(name, [])):
            self.aborted.add(name)
        self.bench.scheduler.abort(name)

    @rule(which=st.integers(0, 5))
    def lose(self, which: int) -> None:
        """The store drops an item, or has it again."""
        self.bench.store.stored ^= {KEYS[which]}

    @rule(which=st.integers(0, 5))
    def slow(self, which: int) -> None:
        self.bench.store.undecided ^= {KEYS[which]}

    @precondition(lambda self: self.bench.num_in_flight < self.max_in_flight)
    @rule()
    def schedule(self) -> None:
        self.bench.begin()

    @precondition(lambda self: self.bench.num_in_flight)
    @rule(
        ends=st.lists(st.booleans(), min_size=4, max_size=8),
        fails=st.lists(st.booleans(), min_size=4, max_size=8),
    )
    def execute(self, ends: list[bool], fails: list[bool]) -> None:
        bench = self.bench

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

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.store.undecided.clear()
        while bench.num_in_flight:
            bench.finish()
        for _ in range(5000):  # at a budget of one token a step, long lives take long
            if not bench.scheduler.has_work and not bench.leased:
                break
            bench.begin()
            bench.finish(
                loaded=list(bench.loading),
                prepared=list(bench.preparing),
                saved=list(bench.saving),
                pulled=list(bench.pulling),
                sent=list(bench.leased),
            )
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
