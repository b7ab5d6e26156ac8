"""Workers that are full, silent or talk nonsense, and clients that do not read."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos import common_pb2, decode_pb2, encoder_pb2, prefill_pb2
from router.stages import Patience
from tests.router.stubs import FIRST_TOKEN, Stub, chat, cluster, collect, text_of, until
from tests.router.test_faults import EIGHT, FIVE, failure

_STAGES = [("encoders", "encode"), ("prefills", "prefill"), ("decodes", "decode")]
_FEATURE = common_pb2.Feature(key="0" * 64, modality="image", num_embeds=4, grid=[1, 4, 4], width=8)
_NONSENSE = {
    "encoders": [
        encoder_pb2.EncodeResponse(),
        encoder_pb2.EncodeResponse(feature=_FEATURE),  # another item's
    ],
    "prefills": [
        prefill_pb2.PrefillResponse(),
        prefill_pb2.PrefillResponse(missing=common_pb2.MissingItems()),
        prefill_pb2.PrefillResponse(missing=common_pb2.MissingItems(keys=["0" * 64])),
        prefill_pb2.PrefillResponse(prefilled=prefill_pb2.Prefilled(token_id=1)),
        prefill_pb2.PrefillResponse(prefilled=prefill_pb2.Prefilled(prompt_token_ids=[1], token_id=1)),
        prefill_pb2.PrefillResponse(
            prefilled=prefill_pb2.Prefilled(prompt_token_ids=[1], token_id=1, finish_reason=9)  # type: ignore[arg-type]
        ),
    ],
    "decodes": [
        decode_pb2.DecodeResponse(token_ids=range(1000)),
        decode_pb2.DecodeResponse(missing=common_pb2.MissingItems(keys=["0" * 64])),
        decode_pb2.DecodeResponse(finished=decode_pb2.DecodeFinished()),
        decode_pb2.DecodeResponse(token_ids=[FIRST_TOKEN + 1], text=text_of([FIRST_TOKEN + 1])),  # and no end
    ],
}


def twice(**stages: int) -> dict[str, int]:
    return {"encoders": 2, "prefills": 2, "decodes": 2, **stages}


def asked(stubs: list[Stub]) -> list[Stub]:
    return [stub for stub in stubs if stub.requests]


@pytest.mark.parametrize(
    ("stage", "label", "which"), [(*each, i) for each in _STAGES for i in range(len(_NONSENSE[each[0]]))]
)
async def test_nonsense_is_asked_of_another_worker(stage: str, label: str, which: int) -> None:
    async with cluster(**twice()) as c:
        # Whoever is asked first talks nonsense, the other one does not.
        once = [_NONSENSE[stage][which]]
        for stub in getattr(c, stage):
            stub.answers = once
        token_ids, text, _ = await collect(c.stub.Generate(chat(b"one", "?"), timeout=10))
        assert (token_ids, text) == (FIVE, text_of(FIVE))
        assert 1 <= c.total_retries() <= 2  # a stream that brought tokens before is counted as lost
        await c.pipeline.releases.close()


@pytest.mark.parametrize(("stage", "label"), _STAGES)
async def test_nonsense_from_everyone_is_a_named_error(stage: str, label: str) -> None:
    async with cluster(**twice()) as c:
        for stub in getattr(c, stage):
            stub.answers = [_NONSENSE[stage][0]]
        code, details = await failure(c.stub.Generate(chat(b"one", "?"), timeout=10))
        assert code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION)
        assert details
        # The router goes on.
        token_ids, _, _ = await collect(c.stub.Generate(chat(b"one", "?"), timeout=10))
        assert token_ids == FIVE


async def test_an_encoder_of_another_model_is_named_with_both_keys() -> None:
    async with cluster() as c:
        c.encoders[0].answers = [_NONSENSE["encoders"][1]]
        code, details = await failure(c.stub.Generate(chat(b"one", "?"), timeout=10))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "0" * 64 in details


@pytest.mark.parametrize(("stage", "label"), _STAGES)
async def test_a_full_worker_is_passed_over_and_a_full_stage_is_said(stage: str, label: str) -> None:
    async with cluster(**twice()) as c:
        stubs = getattr(c, stage)
        full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full, the limit is 7")
        # Whoever is asked first has room sooner, and the other one speaks last.
        stubs[0].failures = stubs[1].failures = [(*full, (("grpc-retry-pushback-ms", ms),)) for ms in ("1500", "2500")]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(c.stub.Generate(chat(b"one", "?"), timeout=10))
        assert (refused.value.code(), refused.value.details()) == full
        trailers = dict(refused.value.trailing_metadata() or ())
        assert (trailers["retry-after"], trailers["grpc-retry-pushback-ms"]) == ("2", "1500"), "the sooner of both"
        assert c.retries(label, "overloaded") == c.total_retries() == 1
        await c.pipeline.releases.close()
        assert not c.prefills[0].leases | c.prefills[1].leases
        stubs[0].failures = stubs[1].failures = []
        token_ids, _, _ = await collect(c.stub.Generate(chat(b"one", "?"), timeout=10))
        assert token_ids == FIVE


async def test_a_time_to_come_again_that_is_none_is_not_passed_on() -> None:
    async with cluster() as c:
        for said in ("", "-5", "soon", "9" * 5000):
            trailers = (("grpc-retry-pushback-ms", said),)
            c.prefills[0].failures = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", trailers)]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await collect(c.stub.Generate(chat("?"), timeout=10))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "retry-after" not in dict(refused.value.trailing_metadata() or ())


@pytest.mark.parametrize(("stage", "label"), _STAGES)
async def test_a_silent_worker_is_left_where_there_is_another(stage: str, label: str) -> None:
    async with cluster(**twice(), patience=Patience(stall_s=1)) as c:
        stubs = getattr(c, stage)
        gate = asyncio.Event()
        for stub in stubs:
            stub.gate = gate
        call = asyncio.ensure_future(collect(c.stub.Generate(chat(b"one", "?"), timeout=10)))
        await until(lambda: bool(asked(stubs)))
        silent = asked(stubs)[0]
        other = next(stub for stub in stubs if stub is not silent)
        other.gate = None
        token_ids, _, _ = await call
        assert token_ids == FIVE
        assert c.retries(label, "stalled") == c.total_retries() == 1
        async with asyncio.timeout(5):  # half of what the client's deadline would take
            await silent.cancelled.wait()
        await c.pipeline.releases.close()
        assert not c.prefills[0].leases | c.prefills[1].leases


async def test_a_stream_that_falls_silent_goes_on_elsewhere() -> None:
    async with cluster(**twice(), patience=Patience(stall_s=1)) as c:
        for decode in c.decodes:
            decode.hold_after = 3
        call = asyncio.ensure_future(collect(c.stub.Generate(chat("hello", max_tokens=8), timeout=10)))
        await until(lambda: bool(asked(c.decodes)))
        next(decode for decode in c.decodes if not decode.requests).hold_after = None
        token_ids, text, _ = await call
        assert (token_ids, text) == (EIGHT, text_of(EIGHT))


async def test_a_silent_worker_is_waited_for_where_it_is_the_only_one() -> None:
    async with cluster(patience=Patience(stall_s=0.05)) as c:
        c.prefills[0].gate = asyncio.Event()
        call = asyncio.ensure_future(collect(c.stub.Generate(chat("hello"), timeout=10)))
        async with asyncio.timeout(30):
            await c.prefills[0].entered.get()
        await asyncio.sleep(0.6)  # longer than its patience; that nothing happens is the point
        c.prefills[0].gate.set()
        token_ids, _, _ = await call
        assert token_ids == FIVE
        assert c.total_retries() == 0


async def test_a_client_that_never_reads_is_given_up_and_holds_up_nobody() -> None:
    async with cluster(patience=Patience(client_s=0.5)) as c:
        # More than HTTP/2 takes into its windows on both sides.
        c.decodes[0].text_bytes = 64 * 1024
        silent = c.stub.Generate(chat("hello", max_tokens=1000), timeout=30)
        await until(lambda: c.metrics.running._value.get() == 1)
        token_ids, _, _ = await collect(c.stub.Generate(chat("hello"), timeout=10))
        assert token_ids == FIVE
        await until(lambda: c.metrics.running._value.get() == 0)
        await until(lambda: c.decodes[0].num_streams == 0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in silent:
                pass
        assert error.value.code() == grpc.StatusCode.CANCELLED
        assert "took nothing" in error.value.details()
