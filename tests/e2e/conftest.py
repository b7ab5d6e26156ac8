"""One cluster for all end-to-end tests: router, encoder, prefill and decode as real processes, in float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from cli.cluster import LocalCluster
from protos import common_pb2, decode_pb2_grpc, encoder_pb2_grpc, prefill_pb2_grpc, router_pb2, router_pb2_grpc
from tests.failure_watch import failures
from tests.reference import Conversation

TIMEOUT_S = 100.0
#: Small, so that a prompt of ordinary length takes several chunks.
TOKEN_BUDGET = 96

_STUBS = {
    "encoder": encoder_pb2_grpc.EncoderStub,
    "prefill": prefill_pb2_grpc.PrefillStub,
    "decode": decode_pb2_grpc.DecodeStub,
    "router": router_pb2_grpc.RouterStub,
}


def chat_request(conversation: Conversation, **sampling: object) -> router_pb2.GenerateRequest:
    """A conversation as a request; greedy, end-of-sequence ignored and 64 tokens unless told otherwise."""
    messages = []
    for role, parts in conversation:
        content = []
        for part in parts:
            if isinstance(part, str):
                content.append(common_pb2.ContentPart(text=common_pb2.TextPart(text=part)))
            else:
                content.append(common_pb2.ContentPart(image=common_pb2.ImagePart(data=part)))
        messages.append(common_pb2.ChatMessage(role=role, content=content))
    fields = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, **sampling}
    return router_pb2.GenerateRequest(
        chat=common_pb2.ChatPrompt(messages=messages), sampling=common_pb2.SamplingParams(**fields)
    )


class Cluster:
    """A running cluster, and questions to it."""

    def __init__(self, local: LocalCluster) -> None:
        self.local = local
        self.channel = grpc.insecure_channel(local.router)
        self.router = router_pb2_grpc.RouterStub(self.channel)

    def generate(self, request: router_pb2.GenerateRequest) -> list[router_pb2.GenerateResponse]:
        return list(self.router.Generate(request, timeout=TIMEOUT_S))

    def tokens(self, conversation: Conversation, **sampling: object) -> list[int]:
        responses = self.generate(chat_request(conversation, **sampling))
        return [token for response in responses for token in response.token_ids]

    def ask(self, stage: str, method: str, message: object, index: int = 0) -> object:
        """One unary call to one worker."""
        address = self.local.router if stage == "router" else self.local.workers[stage][index].grpc
        with grpc.insecure_channel(address) as channel:
            return getattr(_STUBS[stage](channel), method)(message, timeout=TIMEOUT_S)

    def info(self, stage: str) -> common_pb2.ServerInfo:
        made = self.ask(stage, "GetServerInfo", common_pb2.GetServerInfoRequest())
        assert isinstance(made, common_pb2.ServerInfo)
        return made

    def load(self, stage: str) -> common_pb2.Load:
        made = self.ask(stage, "GetLoad", common_pb2.GetLoadRequest())
        assert isinstance(made, common_pb2.Load)
        return made

    def counter(self, stage: str, name: str) -> int:
        return int(self.load(stage).counters[name])

    def wait_empty(self, timeout_s: float = 30.0) -> None:
        """Every stage holds nothing: requests, blocks, leases, items."""

        def held() -> dict[str, tuple[int, ...]]:
            state = {}
            for stage in ("encoder", "prefill", "decode", "router"):
                load = self.load(stage)
                state[stage] = (
                    load.num_requests_running,
                    load.num_requests_waiting,
                    load.kv_blocks_held,
                    load.kv_leases,
                    load.encoder_cache_bytes_held,
                )
            return state

        wait_until(lambda: not any(any(values) for values in held().values()), timeout_s, held)

    def wait_serving(self, conversation: Conversation) -> None:
        """Until it is answered: a worker that was started again serves a moment before the router has seen it."""

        def is_answered() -> bool:
            try:
                self.tokens(conversation, max_tokens=1)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
            return True

        wait_until(is_answered, TIMEOUT_S, lambda: "no answer")

    def assert_no_failures(self) -> None:
        counted = {stage: failures(self.load(stage).counters) for stage in ("encoder", "prefill", "decode", "router")}
        assert not any(counted.values()), counted


def wait_until(condition: Callable[[], bool], timeout_s: float, describe: Callable[[], object]) -> None:
    """Ask again until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not after {timeout_s} s: {describe()}"
        time.sleep(0.02)  # the condition lives in another process; there is no event to await


@pytest.fixture(scope="package")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    local = LocalCluster(
        tiny_model,
        service_args=["--dtype", "float32", f"--max-num-batched-tokens={TOKEN_BUDGET}", "--max-model-len=2048"],
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    with local:
        yield Cluster(local)
