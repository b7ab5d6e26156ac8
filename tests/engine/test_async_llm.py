"""AsyncLLM over a real engine process: what it streams, what a cancel frees, and how calls end when the engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from core.errors import IncompatibleError, InvalidRequestError, StageUnavailableError
from core.types import Feature, FinishReason, PlacedFeature, SamplingParams
from engine.async_llm import AsyncLLM
from engine.protocol import EngineCoreRequest, EngineStats, RequestOutput
from tests.engine.engines import engine_config
from tests.pictures import picture

PICTURE = picture(1, 96, 64)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
DEADLINE_S = 30

Watch = Callable[[Callable[[EngineStats], bool]], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncLLM]:
    made = await AsyncLLM.start(engine_config(tiny_model, tmp_path_factory.mktemp("store"), where="test-0"))
    yield made
    await made.shutdown()


@pytest.fixture
def watch(llm: AsyncLLM) -> Watch:
    """Waits until the engine's own numbers are as wanted."""
    changed = asyncio.Event()
    llm.on_stats = lambda stats: changed.set()

    async def wait(condition: Callable[[EngineStats], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition(llm.stats):
                changed.clear()
                await changed.wait()

    return wait


def request(name: str, **changes: Any) -> EngineCoreRequest:
    values = {"prompt_token_ids": [5, 6, 7], "sampling": LONG, **changes}
    return EngineCoreRequest(name, time.time(), **values)


def empty(stats: EngineStats) -> bool:
    return not (stats.num_running or stats.num_waiting or stats.kv_blocks_held or stats.encoder_cache_bytes_held)


async def collect(llm: AsyncLLM, wanted: EngineCoreRequest) -> list[RequestOutput]:
    return [output async for output in llm.generate(wanted)]


@pytest.mark.asyncio(loop_scope="module")
class TestOneEngine:
    async def test_an_image_and_its_answer(self, llm: AsyncLLM, watch: Watch) -> None:
        first = await llm.encode("e", PICTURE)
        second = await llm.encode("e", PICTURE)
        assert (first.cached, second.cached) == (False, True)
        assert first.feature == second.feature
        count = first.feature.num_embeds
        prompt = [5, *[7] * count, 6]
        short = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        outputs = await collect(
            llm, request("g", prompt_token_ids=prompt, features=[PlacedFeature(first.feature, 1)], sampling=short)
        )
        assert sum(len(output.token_ids) for output in outputs) == 8
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        last = outputs[-1]
        assert last.finish_reason is FinishReason.LENGTH
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.image_tokens) == (
            count + 2,
            8,
            count,
        )
        text = "".join(output.text for output in outputs)
        assert llm.prompts is not None
        tokens = [token for output in outputs for token in output.token_ids]
        assert text == llm.prompts.tokenizer.decode(tokens, skip_special_tokens=True)
        await watch(empty)

    async def test_closing_the_stream_frees_everything(self, llm: AsyncLLM, watch: Watch) -> None:
        before = llm.stats.counters["generation_tokens_total"]
        async with aclosing(llm.generate(request("c"))) as outputs:
            async for _ in outputs:
                break
            assert llm.stats.kv_blocks_held > 0
        await watch(empty)
        assert llm.stats.counters["generation_tokens_total"] - before < 200, "it went on to its end"
        assert llm._streams == {}

    async def test_a_cancelled_task_frees_everything(self, llm: AsyncLLM, watch: Watch) -> None:
        before = llm.stats.counters["generation_tokens_total"]
        tasks = [asyncio.create_task(collect(llm, request(f"t{i}"))) for i in range(12)]
        await watch(lambda stats: stats.num_running > 0)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        await watch(empty)
        assert llm.stats.counters["generation_tokens_total"] - before < 12 * 200, "they went on to their end"

    async def test_an_id_in_use_is_refused(self, llm: AsyncLLM, watch: Watch) -> None:
        task = asyncio.create_task(collect(llm, request("same")))
        await watch(lambda stats: stats.num_running > 0)
        with pytest.raises(InvalidRequestError, match="same is in use"):
            await collect(llm, request("same"))
        assert len((await task)[-1].token_ids) >= 1

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"prompt_token_ids": []}, InvalidRequestError, "no tokens"),
            ({"prompt_token_ids": [5] * 256}, InvalidRequestError, "max_model_len is 256"),
            ({"prompt_token_ids": [5, 5000]}, InvalidRequestError, "vocabulary"),
            ({"features": [(4, 4)]}, InvalidRequestError, "image 1: ends at token 8"),
            ({"features": [(0, 3, 99)]}, IncompatibleError, "embedding width"),
            ({"features": [(0, 3)]}, InvalidRequestError, "contradict"),
            ({"hand_over": True}, IncompatibleError, "--kv-role"),
        ],
    )
    async def test_a_bad_request_fails_alone(
        self, llm: AsyncLLM, watch: Watch, changes: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        places = changes.get("features", [])
        features = [
            PlacedFeature(Feature("a" * 64, place[1], (1, 4, 4), (*place, llm.info.embed_width)[2]), place[0])
            for place in places
        ]
        with pytest.raises(error, match=words):
            await collect(llm, request("bad", **{**changes, "features": features}))
        await watch(empty)


async def test_calls_end_when_the_engine_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    llm = await AsyncLLM.start(engine_config(tiny_model, tmp_path, where="encoder-7"))
    started = asyncio.Event()

    async def consume(name: str) -> None:
        async for _ in llm.generate(request(name)):
            started.set()

    # Stopped, so that what is asked of it is still open when it dies.
    calls = [asyncio.create_task(consume("g1"))]
    await started.wait()
    os.kill(llm.info.pid, signal.SIGSTOP)
    calls += [asyncio.create_task(consume("g2")), asyncio.create_task(llm.encode("e", PICTURE))]
    failed = asyncio.create_task(llm.wait_failed())
    await asyncio.sleep(0)
    os.kill(llm.info.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        ends = await asyncio.gather(*calls, return_exceptions=True)
        reason = await failed
    assert "ended with code -9" in reason
    for end in ends:
        assert isinstance(end, StageUnavailableError), end
        assert end.stage == "encoder-7"
    with pytest.raises(StageUnavailableError, match="encoder-7"):
        await collect(llm, request("late"))
    await llm.release("nothing")
    await llm.shutdown()


async def test_calls_end_when_the_worker_stops(tiny_model: Path, tmp_path: Path) -> None:
    llm = await AsyncLLM.start(engine_config(tiny_model, tmp_path))
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in llm.generate(request("g")):
            started.set()

    call = asyncio.create_task(consume())
    await started.wait()
    await llm.shutdown()
    with pytest.raises(StageUnavailableError, match="stopping"):
        await call
    with pytest.raises(StageUnavailableError, match="stopping"):
        await collect(llm, request("late"))
