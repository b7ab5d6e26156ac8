"""The three servicers over real gRPC: what they check, translate, abort and give back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from core.config import ConnectorConfig, EngineConfig
from core.convert import feature_to_proto, kv_handle_to_proto, placed_to_proto
from core.errors import EngineError, InvalidRequestError, OverloadedError
from core.keys import content_hash, item_key
from core.options import ServeSettings
from core.server import CHANNEL_OPTIONS, GrpcServer
from core.types import ECRole, Feature, KVHandle, KVRole, PlacedFeature, SamplingParams, Stage
from protos import common_pb2, decode_pb2, decode_pb2_grpc, encoder_pb2, encoder_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.decode import servicer as decode
from services.encoder import servicer as encoder
from services.prefill import servicer as prefill
from services.prefill.leases import Leases
from services.worker import Worker
from tests.services.fake_engine import IMAGE_TOKEN, NAMESPACE, VOCAB_SIZE, WIDTH, FakeEngine

WAIT_S = 30.0
FEATURE = Feature("0a" * 32, 3, (1, 4, 4), WIDTH)
HANDLE = KVHandle("FakeConnector", b"blocks", 5)
CONFIG = EngineConfig(
    model="/models/some-model",
    ec_role=ECRole.BOTH,
    ec_connector=ConnectorConfig("SomeEC"),
    kv_role=KVRole.BOTH,
    kv_connector=ConnectorConfig("SomeKV"),
    max_images_per_prompt=2,
)
SETTINGS = ServeSettings("127.0.0.1", 0, 0, 1.0, "INFO", "prefill-0", "some-model")


class Stubs:
    """All three services of one process, on one channel."""

    def __init__(self, worker: Worker, engine: FakeEngine, channel: grpc.aio.Channel) -> None:
        self.worker = worker
        self.engine = engine
        self.encoder = encoder_pb2_grpc.EncoderStub(channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(channel)
        self.decode = decode_pb2_grpc.DecodeStub(channel)


@asynccontextmanager
async def serving(*, attached: bool = True) -> AsyncIterator[Stubs]:
    engine = FakeEngine()
    worker = Worker(Stage.PREFILL, CONFIG, SETTINGS)
    if attached:
        worker.attach(engine)
    server = GrpcServer("127.0.0.1", 0)
    names = [stage.add_to_server(worker, server.server) for stage in (encoder, prefill, decode)]
    assert names == ["triptych.v1.Encoder", "triptych.v1.Prefill", "triptych.v1.Decode"]
    await server.start(names)
    async with grpc.aio.insecure_channel(server.bound, options=CHANNEL_OPTIONS) as channel:
        yield Stubs(worker, engine, channel)
    await server.drain(0)


def encode_request(image: bytes = b"some file", **changes: Any) -> encoder_pb2.EncodeRequest:
    fields = {"request_id": "r", "image": image, "content_hash": content_hash(image), **changes}
    return encoder_pb2.EncodeRequest(**fields)


def chat_request(**changes: Any) -> prefill_pb2.PrefillRequest:
    content = [
        common_pb2.ContentPart(image=common_pb2.ImagePart()),
        common_pb2.ContentPart(text=common_pb2.TextPart(text="What is it?")),
    ]
    chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content=content)])
    fields = {"request_id": "r", "chat": chat, "features": [feature_to_proto(FEATURE)], **changes}
    return prefill_pb2.PrefillRequest(**fields)


def decode_request(**changes: Any) -> decode_pb2.DecodeRequest:
    fields = {
        "request_id": "r",
        "prompt_token_ids": [1, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, 2],
        "features": placed_to_proto([PlacedFeature(FEATURE, 1)]),
        "output_token_ids": [100],
        "sampling": common_pb2.SamplingParams(temperature=0),
        "kv": kv_handle_to_proto(HANDLE),
        **changes,
    }
    return decode_pb2.DecodeRequest(**fields)


async def refused(call: Any) -> str:
    """Details of a call that must end in INVALID_ARGUMENT."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    return caught.value.details() or ""


# ---- encoder ----


async def test_an_image_becomes_a_feature() -> None:
    async with serving() as stubs:
        request = encode_request(tenant="t", reported_missing=True)
        response = await stubs.encoder.Encode(request, timeout=WAIT_S)
        assert response.feature.key == item_key(content_hash(b"some file"), NAMESPACE, "t")
        assert list(response.feature.grid) == [1, 4, 4]
        assert [span.name for span in response.spans] == ["encode"]
        [(request_id, tenant, reported_missing)] = stubs.engine.encoded
        assert request_id.startswith("r-")
        assert (tenant, reported_missing) == ("t", True)


async def test_images_of_one_request_are_apart_in_the_engine() -> None:
    async with serving() as stubs:
        calls = [stubs.encoder.Encode(encode_request(bytes([i]) * 9), timeout=WAIT_S) for i in range(3)]
        await asyncio.gather(*calls)
        assert len({request_id for request_id, _, _ in stubs.engine.encoded}) == 3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (encode_request(b""), "image is empty"),
        (encode_request(content_hash=b"\0" * 32), "content_hash is not the BLAKE3 of image"),
        (encode_request(bytes(300_000), content_hash=b"\0" * 32), "content_hash is not the BLAKE3 of image"),
        (encode_request(content_hash=b"short"), "content_hash has 5 bytes, not 32"),
        (encode_request(bytes(32 * 1024 * 1024 + 1)), "image has 33554433 bytes, more than 33554432"),
        (encode_request(request_id="a\nb"), "request_id"),
        (encode_request(tenant="t" * 257), "tenant"),
    ],
    ids=["empty", "hash", "hash-large", "hash-length", "size", "request-id", "tenant"],
)
async def test_encode_refuses_before_the_engine_sees_it(request_: encoder_pb2.EncodeRequest, message: str) -> None:
    async with serving() as stubs:
        assert message in await refused(stubs.encoder.Encode(request_, timeout=WAIT_S))
        assert not stubs.engine.encoded


# ---- prefill ----


async def test_a_chat_is_expanded_computed_and_leased() -> None:
    async with serving() as stubs:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=5)
        response = await stubs.prefill.Prefill(chat_request(sampling=sampling), timeout=WAIT_S)
        [request] = stubs.engine.requests
        assert request.prompt_token_ids == [IMAGE_TOKEN] * 3 + [1]
        assert request.features == [PlacedFeature(FEATURE, 0)]
        assert request.sampling == SamplingParams(temperature=0, max_tokens=5)
        assert request.hand_over
        prefilled = response.prefilled
        assert list(prefilled.prompt_token_ids) == request.prompt_token_ids
        assert list(prefilled.features) == placed_to_proto(request.features)
        assert (prefilled.token_id, prefilled.text, prefilled.finish_reason) == (100, "a", 0)
        assert prefilled.kv.params == request.request_id.encode()
        assert prefilled.usage.prompt_tokens == 4
        assert [span.name for span in response.spans] == ["prefill"]
        assert not stubs.engine.aborted


async def test_tokens_are_expanded() -> None:
    async with serving() as stubs:
        tokens = common_pb2.TokenPrompt(token_ids=[5, IMAGE_TOKEN, 6], images=[common_pb2.ImagePart()])
        await stubs.prefill.Prefill(chat_request(tokens=tokens, chat=None), timeout=WAIT_S)
        assert stubs.engine.requests[0].prompt_token_ids == [5, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, 6]


async def test_a_resumed_prompt_goes_on_after_its_tokens() -> None:
    async with serving() as stubs:
        expanded = prefill_pb2.ExpandedPrompt(
            prompt_token_ids=[1, 2, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN],
            features=placed_to_proto([PlacedFeature(FEATURE, 2)]),
            output_token_ids=[100, 101],
        )
        request = prefill_pb2.PrefillRequest(request_id="r", expanded=expanded)
        response = await stubs.prefill.Prefill(request, timeout=WAIT_S)
        assert stubs.engine.requests[0].output_token_ids == [100, 101]
        assert response.prefilled.token_id == 102


async def test_missing_items_are_named() -> None:
    async with serving() as stubs:
        stubs.engine.missing = [FEATURE.key]
        response = await stubs.prefill.Prefill(chat_request(), timeout=WAIT_S)
        assert list(response.missing.keys) == [FEATURE.key]
        assert not response.HasField("prefilled")


async def test_a_request_that_ends_with_its_first_token_has_no_handle() -> None:
    async with serving() as stubs:
        stubs.engine.finish_at_once = True
        response = await stubs.prefill.Prefill(chat_request(), timeout=WAIT_S)
        assert response.prefilled.finish_reason == common_pb2.FINISH_REASON_STOP
        assert not response.prefilled.HasField("kv")


FEATURES_3 = [feature_to_proto(FEATURE)] * 3
TOKENS = common_pb2.TokenPrompt(token_ids=[5])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (prefill_pb2.PrefillRequest(), "prompt is absent"),
        (chat_request(features=[]), "differ in number"),
        (chat_request(features=FEATURES_3), "the prompt has 3 images, more than 2"),
        (chat_request(features=[common_pb2.Feature(key="x")]), "features[0].key"),
        (chat_request(sampling=common_pb2.SamplingParams(top_p=2)), "sampling.top_p=2.0"),
        (chat_request(tokens=TOKENS, chat=None), "tokens.images has 0 entries, features 1"),
        (
            prefill_pb2.PrefillRequest(
                chat=common_pb2.ChatPrompt(
                    messages=[common_pb2.ChatMessage(role="user", content=[common_pb2.ContentPart()])]
                )
            ),
            "chat.messages[0].content[0] is neither text nor image",
        ),
        (
            prefill_pb2.PrefillRequest(
                tokens=common_pb2.TokenPrompt(token_ids=[7], images=[common_pb2.ImagePart(data=b"x")]),
                features=[feature_to_proto(FEATURE)],
            ),
            "tokens.images carries an image",
        ),
        (
            prefill_pb2.PrefillRequest(
                expanded=prefill_pb2.ExpandedPrompt(prompt_token_ids=[1]), features=[feature_to_proto(FEATURE)]
            ),
            "features is to be empty beside expanded",
        ),
        (
            prefill_pb2.PrefillRequest(expanded=prefill_pb2.ExpandedPrompt(prompt_token_ids=[1, VOCAB_SIZE])),
            "prompt_token_ids holds 1000; the vocabulary ends at 999",
        ),
    ],
)
async def test_prefill_refuses_before_the_engine_sees_it(request_: prefill_pb2.PrefillRequest, message: str) -> None:
    async with serving() as stubs:
        assert message in await refused(stubs.prefill.Prefill(request_, timeout=WAIT_S))
        assert not stubs.engine.requests


async def test_a_handle_serves_the_tenant_that_it_was_made_for() -> None:
    async with serving() as stubs:
        response = await stubs.prefill.Prefill(chat_request(tenant="a"), timeout=WAIT_S)
        assert response.prefilled.kv.tenant == "a"
        mine = decode_request(tenant="a", kv=response.prefilled.kv)
        assert await stubs.decode.Decode(mine, timeout=WAIT_S).read() is not grpc.aio.EOF


async def test_a_handle_given_back_releases_its_request_once() -> None:
    async with serving() as stubs:
        responses = [await stubs.prefill.Prefill(chat_request(), timeout=WAIT_S) for _ in range(2)]
        release = prefill_pb2.ReleaseRequest(request_id="r", kv=responses[1].prefilled.kv)
        for _ in range(2):
            await stubs.prefill.Release(release, timeout=WAIT_S)
        assert stubs.engine.released == [stubs.engine.requests[1].request_id]


async def test_a_release_without_a_handle_names_the_request() -> None:
    """The way out for a caller that cancelled while the reply with the handle was under way."""
    async with serving() as stubs:
        for request_id in ("r", "r", "other"):
            await stubs.prefill.Prefill(chat_request(request_id=request_id), timeout=WAIT_S)
        await stubs.prefill.Release(prefill_pb2.ReleaseRequest(request_id="r"), timeout=WAIT_S)
        assert sorted(stubs.engine.released) == sorted(r.request_id for r in stubs.engine.requests[:2])


async def test_unknown_handles_are_ignored() -> None:
    async with serving() as stubs:
        await stubs.prefill.Release(prefill_pb2.ReleaseRequest(kv=kv_handle_to_proto(HANDLE)), timeout=WAIT_S)
        assert not stubs.engine.released


async def test_a_cancelled_prefill_is_aborted_and_its_lease_given_up() -> None:
    async with serving() as stubs:
        stubs.engine.gate.clear()
        call = stubs.prefill.Prefill(chat_request())
        await asyncio.wait_for(stubs.engine.entered.wait(), WAIT_S)
        call.cancel()
        await asyncio.wait_for(stubs.engine.released_one.wait(), WAIT_S)
        assert stubs.engine.aborted == stubs.engine.released == [stubs.engine.requests[0].request_id]


async def test_a_prefill_past_its_deadline_is_aborted() -> None:
    async with serving() as stubs:
        stubs.engine.gate.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stubs.prefill.Prefill(chat_request(), timeout=1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(stubs.engine.aborted_one.wait(), WAIT_S)


def test_the_memory_of_handles_is_bounded() -> None:
    leases = Leases(max_leases=2)
    handles = [KVHandle("c", bytes([i]), 1) for i in range(3)]
    for i, handle in enumerate(handles):
        leases.remember(handle, "r", f"e{i}")
    assert len(leases) == 2
    assert leases.forget(handles[0]) == []
    assert leases.forget(handles[1]) == ["e1"]
    assert leases.forget_request("r") == ["e2"]
    assert leases.forget_request("r") == []
    assert len(leases) == 0


# ---- decode ----


async def test_decode_streams_to_the_end() -> None:
    async with serving() as stubs:
        responses = [r async for r in stubs.decode.Decode(decode_request(), timeout=WAIT_S)]
        [request] = stubs.engine.requests
        assert (request.kv, request.output_token_ids, request.hand_over) == (HANDLE, [100], False)
        assert request.sampling == SamplingParams(temperature=0)
        assert request.features == [PlacedFeature(FEATURE, 1)]
        assert [(list(r.token_ids), r.text) for r in responses] == [([101], "b"), ([102], "c")]
        assert [r.HasField("finished") for r in responses] == [False, True]
        assert responses[1].finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert responses[1].finished.usage.prompt_tokens == 5
        assert [span.name for span in responses[1].finished.spans] == ["prefill"]
        assert not stubs.engine.aborted


async def test_decode_names_missing_items_last() -> None:
    async with serving() as stubs:
        stubs.engine.missing = [FEATURE.key]
        [response] = [r async for r in stubs.decode.Decode(decode_request(), timeout=WAIT_S)]
        assert list(response.missing.keys) == [FEATURE.key]
        assert not response.HasField("finished")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [1, 2]}, "the last feature ends at 4, beyond the prompt's 2 tokens"),
        ({"prompt_token_ids": [1, 7, 7, 7, VOCAB_SIZE]}, "prompt_token_ids holds 1000"),
        ({"output_token_ids": [VOCAB_SIZE]}, "output_token_ids holds 1000"),
        ({"output_token_ids": []}, "output_token_ids is empty"),
        ({"kv": None}, "kv is absent"),
        ({"kv": common_pb2.KvHandle()}, "kv.connector"),
        ({"tenant": "another"}, "kv was computed for another tenant's request"),
        ({"sampling": common_pb2.SamplingParams(n=3)}, "sampling.n=3"),
    ],
)
async def test_decode_refuses_before_the_engine_sees_it(changes: dict[str, Any], message: str) -> None:
    async with serving() as stubs:
        assert message in await refused(stubs.decode.Decode(decode_request(**changes), timeout=WAIT_S))
        assert not stubs.engine.requests


async def test_a_cancelled_stream_is_aborted_at_once() -> None:
    async with serving() as stubs:
        call = stubs.decode.Decode(decode_request())
        stubs.engine.gate.clear()
        await asyncio.wait_for(stubs.engine.entered.wait(), WAIT_S)
        call.cancel()
        await asyncio.wait_for(stubs.engine.aborted_one.wait(), WAIT_S)
        assert stubs.engine.aborted == [stubs.engine.requests[0].request_id]


# ---- all ----


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OverloadedError("prefill-0: full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (InvalidRequestError("too long"), grpc.StatusCode.INVALID_ARGUMENT),
        (EngineError("broken"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_the_engine_s_errors_keep_their_meaning(error: Exception, code: grpc.StatusCode) -> None:
    async with serving() as stubs:
        stubs.engine.error = error
        for call in (
            stubs.encoder.Encode(encode_request(), timeout=WAIT_S),
            stubs.prefill.Prefill(chat_request(), timeout=WAIT_S),
            stubs.decode.Decode(decode_request(), timeout=WAIT_S).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert (caught.value.code(), caught.value.details()) == (code, str(error))


async def test_a_full_engine_says_when_to_come_again() -> None:
    async with serving() as stubs:
        stubs.engine.error = OverloadedError("prefill-0: full", retry_after_s=2.5)
        for call in (
            stubs.encoder.Encode(encode_request(), timeout=WAIT_S),
            stubs.prefill.Prefill(chat_request(), timeout=WAIT_S),
            stubs.decode.Decode(decode_request(), timeout=WAIT_S).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            trailers = dict(caught.value.trailing_metadata() or ())
            assert (trailers["retry-after"], trailers["grpc-retry-pushback-ms"]) == ("3", "2500")


async def test_before_the_engine_is_ready_every_call_is_unavailable() -> None:
    async with serving(attached=False) as stubs:
        for call in (
            stubs.encoder.Encode(encode_request(), timeout=WAIT_S),
            stubs.prefill.Prefill(chat_request(), timeout=WAIT_S),
            stubs.prefill.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=WAIT_S),
            stubs.decode.GetLoad(common_pb2.GetLoadRequest(), timeout=WAIT_S),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "prefill is unavailable: it is still starting"


async def test_an_engine_s_death_names_the_stage() -> None:
    async with serving() as stubs:
        stubs.engine.gate.clear()
        call = stubs.prefill.Prefill(chat_request(), timeout=WAIT_S)
        await asyncio.wait_for(stubs.engine.entered.wait(), WAIT_S)
        stubs.engine.die("killed")
        stubs.worker.fail("its engine died: killed")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "prefill is unavailable: its engine died: killed"


async def test_server_info_says_what_the_worker_is() -> None:
    async with serving() as stubs:
        for stub, stage in ((stubs.encoder, "encoder"), (stubs.prefill, "prefill"), (stubs.decode, "decode")):
            info = await stub.GetServerInfo(common_pb2.GetServerInfoRequest(), timeout=WAIT_S)
            shown = {field.name: value for field, value in info.ListFields()}
            assert shown.pop("version")
            assert shown == {
                "stage": stage,
                "instance_id": stubs.worker.instance_id,
                "model": "some-model",
                "family": "fake",
                "namespace_digest": NAMESPACE,
                "dtype": "float32",
                "max_model_len": 100,
                "embed_width": WIDTH,
                "ec_role": "ec_both",
                "kv_role": "kv_both",
                "ec_connector": "SomeEC",
                "kv_connector": "SomeKV",
                "kv_layout": "version=1",
                "weights_loaded_bytes": 11,
                "weights_skipped_bytes": 22,
                "max_images_per_prompt": 2,
                "engine_pid": 4242,
                "kv_block_size": 16,
            }


async def test_load_follows_the_engine() -> None:
    async with serving() as stubs:
        stubs.engine.set_leases(3)
        for stub in (stubs.encoder, stubs.prefill, stubs.decode):
            assert (await stub.GetLoad(common_pb2.GetLoadRequest(), timeout=WAIT_S)).kv_leases == 3
