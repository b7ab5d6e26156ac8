"""Two thousand damaged images and requests through the front door: each ends, soon, with an answer or with a status
that says what was wrong with it, and afterwards the cluster is as it was."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cli.process import Child
from protos import router_pb2
from tests.e2e.conftest import Cluster
from tests.e2e.mutations import Mutator
from tests.pictures import picture
from tests.reference import Conversation

NUM_IMAGES, NUM_FIELDS, NUM_BYTES = 1000, 500, 500
NUM_AT_ONCE = 16
#: For one request, with fifteen others beside it on two slow cores.
DEADLINE_S = 30.0
GOOD: Conversation = [("user", [picture(600, 64, 96), "What is this?"])]


def children(cluster: Cluster) -> list[Child]:
    return [cluster.local.router_process, *(child for those in cluster.local.workers.values() for child in those)]


def logged(child: Child) -> int:
    assert child.log_path is not None
    return Path(child.log_path).stat().st_size if Path(child.log_path).exists() else 0


@pytest.mark.timeout(300)
def test_two_thousand_damaged_requests(cluster: Cluster) -> None:
    answer = cluster.tokens(GOOD, max_tokens=8)
    engines = {stage: cluster.info(stage).engine_pid for stage in ("encoder", "prefill", "decode")}
    before = {child.name: logged(child) for child in children(cluster)}
    mutator = Mutator(seed=3)
    requests = [mutator.image_request() for _ in range(NUM_IMAGES)]
    requests += [mutator.field_request() for _ in range(NUM_FIELDS)]
    requests += [mutator.byte_request() for _ in range(NUM_BYTES)]
    generate = cluster.channel.unary_stream(
        "/triptych.v1.Router/Generate", response_deserializer=router_pb2.GenerateResponse.FromString
    )

    def outcome(number: int) -> tuple[int, str, str]:
        try:
            responses = list(generate(requests[number], timeout=DEADLINE_S))
        except grpc.RpcError as error:
            return number, error.code().name, error.details()
        tokens = [token for response in responses for token in response.token_ids]
        assert tokens, number
        assert responses[-1].HasField("finished"), number
        return number, "OK", ""

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        outcomes = list(pool.map(outcome, range(len(requests))))

    wrong = [each for each in outcomes if each[1] not in ("OK", "INVALID_ARGUMENT")]
    assert not wrong, wrong[:10]
    assert all(details.isprintable() and details for _, code, details in outcomes if code != "OK")
    # A fuzz that everything refuses at the door, or nothing does, tests nothing behind it.
    for kind in (outcomes[:NUM_IMAGES], outcomes[NUM_IMAGES:-NUM_BYTES], outcomes[-NUM_BYTES:]):
        counts = Counter(code for _, code, _ in kind)
        assert min(counts["OK"], counts["INVALID_ARGUMENT"]) > len(kind) // 20, counts

    cluster.wait_empty(30.0)
    cluster.assert_no_failures()
    assert cluster.local.dead() is None
    assert {stage: cluster.info(stage).engine_pid for stage in engines} == engines
    assert cluster.tokens(GOOD, max_tokens=8) == answer
    for child in children(cluster):
        assert child.log_path is not None
        with open(child.log_path, encoding="utf-8") as file:
            file.seek(before[child.name])
            said = file.read()
        assert "Traceback" not in said, said[said.index("Traceback") :][:3000]
        assert " ERROR " not in said, said
