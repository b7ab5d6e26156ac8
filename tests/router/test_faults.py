"""What goes wrong between the stages, and what the client sees of it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router.retries import MAX_FAILURES
from tests.router.stubs import FIRST_TOKEN, chat, cluster, collect, image_file, text_of, until

FIVE = [FIRST_TOKEN + i for i in range(5)]
EIGHT = [FIRST_TOKEN + i for i in range(8)]
#: Half of what the client's own deadline would take, on a busy machine too.
SOON_S = 5


async def failure(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(call)
    return error.value.code(), error.value.details()


async def test_a_missing_item_is_encoded_again_once() -> None:
    async with cluster() as c:
        c.prefills[0].missing = [[1]]
        token_ids, _, _ = await collect(c.stub.Generate(chat(b"one", b"two", "?")))
        assert token_ids == FIVE
        assert [request.image for request in c.encoders[0].requests[2:]] == [image_file(b"two")]
        assert c.retries("encode", "missing") == c.total_retries() == 1
        # What is encoded again may lie elsewhere, and the consumers are told.
        first, second = ([feature.source for feature in request.features] for request in c.prefills[0].requests)
        assert sorted(first) == ["call 1", "call 2"]
        assert second == [first[0], "call 3"]
        assert [placed.feature.source for placed in c.decodes[0].requests[0].features] == second


async def test_an_item_that_stays_missing_is_an_error_that_names_encode() -> None:
    async with cluster() as c:
        c.prefills[0].missing = [[0], [0]]
        code, details = await failure(c.stub.Generate(chat(b"one", "?")))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert details.startswith("encoder is unavailable: image 1 ")
        assert len(c.encoders[0].requests) == 2


@pytest.mark.parametrize("after", [0, 3])
async def test_decode_that_misses_an_item_goes_on_without_a_gap(after: int) -> None:
    async with cluster() as c:
        c.decodes[0].missing_after = after
        token_ids, text, finished = await collect(c.stub.Generate(chat(b"one", "?", max_tokens=8)))
        assert token_ids == EIGHT
        assert text == text_of(EIGHT)
        assert finished.usage.completion_tokens == 8
        resumed = c.prefills[0].requests[1].expanded
        assert list(resumed.output_token_ids) == EIGHT[: 1 + after]
        assert [placed.feature.source for placed in resumed.features] == ["call 2"]
        assert list(resumed.prompt_token_ids) == list(c.decodes[0].requests[0].prompt_token_ids)
        assert len(c.encoders[0].requests) == 2
        await c.pipeline.releases.close()
        assert not c.prefills[0].leases  # those that decode did not pull were released


async def test_an_item_may_vanish_again_once_it_was_used() -> None:
    """A decode worker under memory pressure preempts a request as often as it must."""
    async with cluster() as c:
        decode, gate = c.decodes[0], asyncio.Event()
        decode.gate = gate
        answer = asyncio.ensure_future(collect(c.stub.Generate(chat(b"one", "?", max_tokens=8), timeout=10)))
        async with asyncio.timeout(30):
            for after in (1, 0, 2, None):
                await decode.entered.get()
                decode.missing_after = after
                gate.set()  # for the call that waits, and for none after it
                gate.clear()
            assert (await answer)[0] == EIGHT
        assert c.retries("encode", "missing") == c.total_retries() == 3
        assert len(c.encoders[0].requests) == 4


async def test_a_decode_stream_lost_midway_is_resumed_elsewhere() -> None:
    async with cluster(decodes=2) as c:
        c.decodes[0].lose_after = 3
        token_ids, text, _ = await collect(c.stub.Generate(chat(b"one", "?", max_tokens=8)))
        assert token_ids == EIGHT
        assert text == text_of(EIGHT)
        assert [len(decode.requests) for decode in c.decodes] == [1, 1]
        assert c.retries("decode", "lost") == c.total_retries() == 1
        assert len(c.encoders[0].requests) == 1


async def test_a_stream_survives_its_decode_worker_twice() -> None:
    async with cluster(prefills=2, decodes=3) as c:
        for decode in c.decodes[:2]:
            decode.lose_after = 2
        c.decodes[2].lose_after = None
        token_ids, text, finished = await collect(c.stub.Generate(chat(b"one", "?", max_tokens=12)))
        twelve = [FIRST_TOKEN + i for i in range(12)]
        assert (token_ids, text) == (twelve, text_of(twelve))
        assert finished.usage.completion_tokens == 12
        losses = c.retries("decode", "lost")
        assert losses in (1, 2)  # the third worker may have come second
        resumed = [request for prefill in c.prefills for request in prefill.requests if request.HasField("expanded")]
        assert len(resumed) == losses == c.total_retries()
        assert len({request.request_id for prefill in c.prefills for request in prefill.requests}) == 1 + losses


async def test_blocks_that_no_decode_worker_could_pull_are_given_up_and_made_again() -> None:
    async with cluster(decodes=2) as c:
        for decode in c.decodes:
            decode.failures = [(grpc.StatusCode.UNAVAILABLE, "decode is unavailable: the blocks cannot be pulled")] * 2
        token_ids, text, _ = await collect(c.stub.Generate(chat(b"one", "?"), timeout=10))
        assert (token_ids, text) == (FIVE, text_of(FIVE))
        assert len(c.prefills[0].requests) == 2
        assert c.retries("decode", "lost") == 1
        await c.pipeline.releases.close()
        assert not c.prefills[0].leases


async def test_a_request_that_loses_every_worker_it_meets_ends() -> None:
    """It may be what kills them."""
    async with cluster(decodes=2) as c:
        for decode in c.decodes:
            decode.always_lose_after = 1
        code, details = await failure(c.stub.Generate(chat("hello", max_tokens=40), timeout=20))
        assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "decode is unavailable: told to go")
        assert sum(len(decode.requests) for decode in c.decodes) == MAX_FAILURES


@pytest.mark.parametrize(("stage", "label"), [("encoders", "encode"), ("prefills", "prefill"), ("decodes", "decode")])
async def test_an_unavailable_worker_is_passed_over(stage: str, label: str) -> None:
    async with cluster(encoders=2, prefills=2, decodes=2) as c:
        stubs = getattr(c, stage)
        await stubs[0].stop()
        for _ in range(2):
            token_ids, _, _ = await collect(c.stub.Generate(chat(b"one", b"two", b"three", "?")))
            assert token_ids == FIVE
        assert c.retries(label, "unavailable") == c.total_retries() <= 3
        await stubs[1].stop()
        code, details = await failure(c.stub.Generate(chat(b"one", b"two", b"three", "?")))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert details == f"{stage[:-1]} is unavailable: none of its workers can be reached"
        await c.pipeline.releases.close()
        assert not c.prefills[0].leases | c.prefills[1].leases


async def test_a_worker_that_comes_back_is_used_again() -> None:
    async with cluster() as c:
        port = c.prefills[0].server.port
        await c.prefills[0].stop()
        code, _ = await failure(c.stub.Generate(chat("hello")))
        assert code == grpc.StatusCode.UNAVAILABLE
        await c.prefills[0].start(port)
        async with asyncio.timeout(30):
            await c.fleet.wait_until_serving()
        token_ids, _, _ = await collect(c.stub.Generate(chat("hello")))
        assert token_ids == FIVE


@pytest.mark.parametrize("stage", ["encoders", "prefills", "decodes"])
@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION])
async def test_refusals_pass_through_with_code_and_details(stage: str, code: grpc.StatusCode) -> None:
    async with cluster(encoders=2, prefills=2, decodes=2) as c:
        for stub in getattr(c, stage):
            stub.failures = [(code, "too large, the limit is 7")]
        got, details = await failure(c.stub.Generate(chat("a", b"one", "?")))
        which = "image 1: " if stage == "encoders" and code == grpc.StatusCode.INVALID_ARGUMENT else ""
        assert (got, details) == (code, f"{which}too large, the limit is 7")
        assert c.total_retries() == 0
        outcome = "refused" if code == grpc.StatusCode.INVALID_ARGUMENT else "error"  # the client's, or ours
        await until(lambda: c.metrics.counters()[f'router_requests_total{{outcome="{outcome}"}}'] == 1)
        await c.pipeline.releases.close()
        assert not c.prefills[0].leases


async def test_an_error_of_the_encoder_says_which_image_and_stops_the_others() -> None:
    async with cluster() as c:
        encoder = c.encoders[0]
        encode, begun = encoder.Encode, asyncio.Event()

        async def second_fails(request, context):
            if request.image == image_file(b"two"):
                await begun.wait()
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not an image")
            encoder.gate = asyncio.Event()
            begun.set()
            return await encode(request, context)

        encoder.Encode = second_fails
        await encoder.stop()  # the handler is looked up when the server is made
        await encoder.start(encoder.server.port)
        async with asyncio.timeout(30):
            await c.fleet.wait_until_serving()
        code, details = await failure(c.stub.Generate(chat(b"one", b"two", "?"), timeout=10))
        assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "image 2: not an image")
        async with asyncio.timeout(SOON_S):
            await encoder.cancelled.wait()


@pytest.mark.parametrize("stage", ["encoders", "prefills", "decodes"])
async def test_a_cancel_reaches_the_stage_and_frees_the_blocks(stage: str) -> None:
    async with cluster() as c:
        stub = getattr(c, stage)[0]
        stub.gate = asyncio.Event()
        call = c.stub.Generate(chat(b"one", "?"), timeout=10)
        async with asyncio.timeout(30):
            await stub.entered.get()
        call.cancel()
        async with asyncio.timeout(SOON_S):
            await stub.cancelled.wait()
            if stage != "encoders":
                released = await c.prefills[0].released.get()
                # Decode was about to pull; prefill may have sent a reply that nobody reads.
                assert released.HasField("kv") == (stage == "decodes")
                assert released.request_id == c.prefills[0].requests[0].request_id
        assert not c.prefills[0].leases
        await until(lambda: c.metrics.counters()['router_requests_total{outcome="cancelled"}'] == 1)


async def test_a_cancel_in_mid_stream_ends_decode_and_releases_nothing() -> None:
    async with cluster() as c:
        c.decodes[0].hold_after = 2
        call = c.stub.Generate(chat("hello", max_tokens=8), timeout=10)
        for _ in range(3):
            await call.read()
        call.cancel()
        async with asyncio.timeout(SOON_S):
            await c.decodes[0].cancelled.wait()
        await c.pipeline.releases.close()
        assert c.prefills[0].released.empty()  # decode had pulled them


@pytest.mark.parametrize("stage", ["encoders", "prefills", "decodes"])
async def test_the_deadline_reaches_every_stage_and_shrinks(stage: str) -> None:
    async with cluster() as c:
        stub = getattr(c, stage)[0]
        stub.gate = asyncio.Event()
        code, _ = await failure(c.stub.Generate(chat(b"one", "?"), timeout=1))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(SOON_S):
            await stub.cancelled.wait()
        left = [those[0].time_left_s[0] for those in (c.encoders, c.prefills, c.decodes) if those[0].time_left_s]
        assert left
        assert all(0 < seconds <= 1.1 for seconds in left), left  # gRPC rounds a timeout up on the wire
        await c.pipeline.releases.close()
        assert not c.prefills[0].leases


async def test_a_client_without_a_deadline_gets_the_routers() -> None:
    async with cluster(request_timeout_s=1) as c:
        c.decodes[0].hold_after = 1
        code, details = await failure(c.stub.Generate(chat("hello")))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "deadline passed" in details
        async with asyncio.timeout(SOON_S):
            await c.decodes[0].cancelled.wait()


async def test_a_shared_encoding_begun_under_a_short_deadline_serves_the_longer_one() -> None:
    async with cluster() as c:
        c.encoders[0].gate = asyncio.Event()
        short = asyncio.ensure_future(failure(c.stub.Generate(chat(b"same", "?"), timeout=1)))
        async with asyncio.timeout(30):
            await c.encoders[0].entered.get()
        long = asyncio.ensure_future(collect(c.stub.Generate(chat(b"same", "?"), timeout=10)))
        code, _ = await short
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(30):
            await c.encoders[0].entered.get()  # begun anew
        c.encoders[0].gate.set()
        token_ids, _, _ = await long
        assert token_ids == FIVE
