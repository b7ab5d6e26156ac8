"""A request's way through the stages: what runs in parallel, what is skipped, and what the client gets."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from core.keys import content_hash, item_key
from protos import common_pb2, router_pb2
from tests.router.stubs import (
    FIRST_TOKEN,
    NAMESPACE,
    NUM_EMBEDS,
    PLACEHOLDER,
    chat,
    cluster,
    collect,
    image_file,
    text_of,
    until,
)

FIVE = [FIRST_TOKEN + i for i in range(5)]


async def test_streams_tokens_usage_and_a_timeline_of_all_stages() -> None:
    async with cluster() as c:
        token_ids, text, finished = await collect(c.stub.Generate(chat(b"picture", "what?", request_id="mine")))
        assert token_ids == FIVE
        assert text == text_of(FIVE)
        assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert finished.usage == common_pb2.Usage(
            prompt_tokens=NUM_EMBEDS + 5, completion_tokens=5, cached_tokens=2, image_tokens=NUM_EMBEDS
        )
        assert [span.name for span in finished.timeline] == ["request", "encode", "prefill", "kv_transfer", "decode"]
        assert finished.timeline[0].where == "router"
        assert not c.prefills[0].leases
        assert c.total_retries() == 0
        # The stages see the router's own id, and prefill sees no pixels.
        assert c.prefills[0].requests[0].request_id != "mine"
        assert c.prefills[0].requests[0].chat.messages[0].content[0].image.WhichOneof("source") is None
        assert c.encoders[0].requests[0].image == image_file(b"picture")


async def test_text_only_skips_encode() -> None:
    async with cluster() as c:
        _, _, finished = await collect(c.stub.Generate(chat("hello")))
        assert c.encoders[0].requests == []
        assert finished.usage.image_tokens == 0


async def test_first_token_is_sent_before_decode_answers_and_the_last_one_skips_decode() -> None:
    async with cluster() as c:
        c.decodes[0].gate = asyncio.Event()
        call = c.stub.Generate(chat("hello"), timeout=10)
        first = await call.read()
        assert list(first.token_ids) == [FIRST_TOKEN]
        c.decodes[0].gate.set()
        while await call.read() is not grpc.aio.EOF:
            pass
        c.decodes[0].requests.clear()
        token_ids, _, _ = await collect(c.stub.Generate(chat("hello", max_tokens=1)))
        assert token_ids == [FIRST_TOKEN]
        assert c.decodes[0].requests == []


async def test_images_are_encoded_in_parallel_and_arrive_in_prompt_order() -> None:
    async with cluster() as c:
        c.encoders[0].gate = asyncio.Event()
        images = [b"one", b"two", b"three"]
        call = asyncio.ensure_future(collect(c.stub.Generate(chat(*images, "?"), timeout=10)))
        async with asyncio.timeout(30):
            for _ in images:
                await c.encoders[0].entered.get()
        assert c.encoders[0].num_running == 3
        c.encoders[0].gate.set()
        await call
        keys = [feature.key for feature in c.prefills[0].requests[0].features]
        assert keys == [item_key(content_hash(image_file(image)), NAMESPACE) for image in images]


async def test_equal_images_in_flight_are_encoded_once_within_and_across_requests() -> None:
    async with cluster(encoders=2) as c:
        gate = asyncio.Event()
        for encoder in c.encoders:
            encoder.gate = gate
        calls = [
            asyncio.ensure_future(collect(c.stub.Generate(chat(b"same", b"same", "?"), timeout=10))) for _ in range(3)
        ]
        await until(lambda: c.metrics.counters()["router_images_joined_total"] == 2)
        gate.set()
        for token_ids, _, finished in await asyncio.gather(*calls):
            assert token_ids == FIVE
            assert finished.usage.image_tokens == 2 * NUM_EMBEDS
        assert sum(len(encoder.requests) for encoder in c.encoders) == 1
        assert all(len(request.features) == 2 for request in c.prefills[0].requests)


async def test_a_shared_encoding_outlives_the_request_that_began_it() -> None:
    async with cluster() as c:
        c.encoders[0].gate = asyncio.Event()
        first = c.stub.Generate(chat(b"same", "?"), timeout=10)
        async with asyncio.timeout(30):
            await c.encoders[0].entered.get()
        second = asyncio.ensure_future(collect(c.stub.Generate(chat(b"same", "?"), timeout=10)))
        await until(lambda: c.metrics.counters()["router_images_joined_total"] == 1)
        first.cancel()
        await until(lambda: c.metrics.running._value.get() == 1)
        assert not c.encoders[0].cancelled.is_set()
        c.encoders[0].gate.set()
        token_ids, _, _ = await second
        assert token_ids == FIVE
        assert len(c.encoders[0].requests) == 1


async def test_equal_images_meet_at_one_encoder_and_others_spread() -> None:
    async with cluster(encoders=3) as c:
        for _ in range(4):
            await collect(c.stub.Generate(chat(b"again", "?")))
        assert sorted(len(encoder.requests) for encoder in c.encoders) == [0, 0, 4]
        for i in range(24):
            await collect(c.stub.Generate(chat(b"%d" % i, "?", max_tokens=1)))
        assert all(encoder.requests for encoder in c.encoders)


async def test_prefill_and_decode_take_turns() -> None:
    async with cluster(prefills=2, decodes=2) as c:
        for _ in range(6):
            await collect(c.stub.Generate(chat("hello")))
        assert [len(stub.requests) for stub in (*c.prefills, *c.decodes)] == [3, 3, 3, 3]


async def test_token_prompts_pass_through() -> None:
    async with cluster() as c:
        image = common_pb2.ImagePart(data=image_file(b"picture"))
        tokens = common_pb2.TokenPrompt(token_ids=[1, PLACEHOLDER, 2], images=[image])
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=5)
        token_ids, _, finished = await collect(
            c.stub.Generate(router_pb2.GenerateRequest(tokens=tokens, sampling=sampling))
        )
        assert token_ids == FIVE
        assert finished.usage.prompt_tokens == 2 + NUM_EMBEDS
        assert not c.prefills[0].requests[0].tokens.images[0].data


async def test_a_seed_is_chosen_where_sampling_needs_one() -> None:
    async with cluster() as c:
        request = chat("hello")
        request.sampling.temperature = 0.7
        await collect(c.stub.Generate(request))
        await collect(c.stub.Generate(chat("hello")))
        sampled, greedy = c.prefills[0].requests
        assert sampled.sampling.HasField("seed")
        assert c.decodes[0].requests[0].sampling.seed == sampled.sampling.seed
        assert not greedy.sampling.HasField("seed")


async def test_overload_is_refused_at_once() -> None:
    async with cluster(max_inflight=1, max_image_bytes_held=10) as c:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(c.stub.Generate(chat(b"more than ten", "?")))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        c.prefills[0].gate = asyncio.Event()
        held = asyncio.ensure_future(collect(c.stub.Generate(chat("hello"), timeout=10)))
        async with asyncio.timeout(30):
            await c.prefills[0].entered.get()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(c.stub.Generate(chat("hello")))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "limit is 1" in error.value.details()
        load = await c.stub.GetLoad(common_pb2.GetLoadRequest())
        assert load.num_requests_running == 1
        assert load.counters["router_rejected_total"] == 2
        c.prefills[0].gate.set()
        await held


async def test_info_is_that_of_the_model_served() -> None:
    async with cluster() as c:
        info = await c.stub.GetServerInfo(common_pb2.GetServerInfoRequest())
        assert (info.stage, info.model, info.family, info.engine_pid) == ("router", "demo", "qwen3_vl", 0)
        assert info.max_images_per_prompt == 4
