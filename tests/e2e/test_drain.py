"""SIGTERM to an encoder that holds its items itself: what was promised is given first, and nothing else delays it."""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cli.cluster import LocalCluster
from cli.process import Child
from core.keys import content_hash
from protos import encoder_pb2, encoder_pb2_grpc
from tests.e2e.conftest import TIMEOUT_S, Cluster, chat_request, wait_until
from tests.pictures import picture
from tests.reference import Conversation, Reference

#: Much less than the 60 seconds of a lease or of `--drain-timeout`.
_SOON_S = 30.0
_START_S = 120.0
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def there(tiny_model: Path, tmp_path: Path) -> Iterator[Cluster]:
    with LocalCluster(
        tiny_model,
        service_args=["--dtype=float32", "--max-model-len=1024", "--ec-connector=ECPeerConnector"],
        router_args=["--worker-timeout=60", "--stall-timeout=60"],  # a worker is stopped for a while
        log_dir=tmp_path / "logs",
    ) as local:
        yield Cluster(local)


def gauge(worker: Child, name: str) -> float:
    with urllib.request.urlopen(f"http://{worker.addresses['metrics']}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"triptych:{name} "))


def test_what_prefill_has_not_pulled_yet_is_kept_until_it_has(there: Cluster, reference: Reference) -> None:
    local = there.local
    encoder = local.workers["encoder"][0]
    first: Conversation = [("user", [picture(800, 96, 96), "Before?"])]
    second: Conversation = [("user", [picture(801, 96, 96), "And while it leaves?"])]
    assert there.tokens(first, max_tokens=8) == reference.generate(first, 8)
    wait_until(lambda: gauge(encoder, "ec_leases") == 0, TIMEOUT_S, lambda: "a lease, though the item was pulled")
    with ThreadPoolExecutor(1) as pool:
        os.kill(local.pids["prefill-0"], signal.SIGSTOP)
        try:
            answer = pool.submit(there.generate, chat_request(second, max_tokens=8))
            wait_until(lambda: gauge(encoder, "ec_leases") == 1, TIMEOUT_S, lambda: "the item is not there")
            encoder.terminate()
            wait_until(lambda: any("draining" in line for line in encoder.tail()), TIMEOUT_S, encoder.tail)
            # Its calls have ended, and nobody but the stopped process wants anything of it.
            with pytest.raises(TimeoutError):
                answer.result(0.5)
            assert encoder.process.poll() is None, encoder.tail()
        finally:
            os.kill(local.pids["prefill-0"], signal.SIGCONT)
        responses = answer.result(_SOON_S)
    assert [token for response in responses for token in response.token_ids] == reference.generate(second, 8)
    assert encoder.wait_ended(time.monotonic() + _SOON_S), encoder.tail()
    assert encoder.process.returncode == 0
    for stage in ("prefill", "decode", "router"):
        counted = there.load(stage).counters
        assert not [name for name in counted if counted[name] and ("retries" in name or "failures" in name)], counted


def test_what_nobody_pulls_delays_no_longer_than_its_lease(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--dtype=float32", "--port=0", "--metrics-port=0", "--ec-connector=ECPeerConnector"]
    argv = [sys.executable, "-m", "services.encoder", "serve", f"--model={tiny_model}", *options]
    lease = '--ec-connector-extra-config={"lease_s": 0.5}'
    encoder = Child("encoder", [*argv, lease], env={**os.environ, "PYTHONPATH": str(_ROOT)}, log_path=tmp_path / "log")
    encoder.start()
    try:
        assert encoder.wait_ready(time.monotonic() + _START_S), encoder.tail()
        with grpc.insecure_channel(encoder.grpc) as channel:
            image = picture(802, 96, 96)
            request = encoder_pb2.EncodeRequest(request_id="one", image=image, content_hash=content_hash(image))
            encoder_pb2_grpc.EncoderStub(channel).Encode(request, timeout=60)
    finally:
        encoder.terminate()
        ended = encoder.wait_ended(time.monotonic() + _SOON_S)
    assert ended, encoder.tail()
    assert encoder.process.returncode == 0
    said = encoder.tail()
    assert any("drained" in line for line in said)
    assert not any("neither pulled" in line for line in said), said
