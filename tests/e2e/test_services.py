"""What the whole cluster promises besides equal tokens: the split, the cache, cancelling, deadlines, restarts."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from cli.cluster import LocalCluster
from tests.e2e.conftest import Cluster, chat_request
from tests.e2e.conversations import CONVERSATIONS
from tests.pictures import picture
from tests.reference import Conversation, Reference


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_the_split_is_visible(cluster: Cluster) -> None:
    encoder, prefill, decode = (cluster.info(stage) for stage in ("encoder", "prefill", "decode"))
    assert encoder.ec_role == "ec_producer"
    assert (prefill.kv_role, decode.kv_role) == ("kv_producer", "kv_consumer")
    # Every weight is held by one side and skipped by the other.
    assert encoder.weights_loaded_bytes == prefill.weights_skipped_bytes > 0
    assert encoder.weights_skipped_bytes == prefill.weights_loaded_bytes == decode.weights_loaded_bytes > 0
    assert cluster.load("encoder").kv_blocks_total == 0
    assert cluster.load("prefill").kv_blocks_total > 0
    assert cluster.load("decode").kv_blocks_total > 0
    assert encoder.namespace_digest == prefill.namespace_digest == decode.namespace_digest


def test_no_process_that_speaks_grpc_has_torch(cluster: Cluster) -> None:
    cluster.tokens(CONVERSATIONS["one image"], max_tokens=2)
    for name, pid in cluster.local.pids.items():
        assert not loads_torch(pid), name
    for stage in ("encoder", "prefill", "decode"):
        assert loads_torch(cluster.info(stage).engine_pid), stage


def test_a_picture_seen_before_does_not_run_the_vision_tower(cluster: Cluster) -> None:
    conversation: Conversation = [("user", [picture(100, 96, 96), "First?"])]
    again: Conversation = [("user", [picture(100, 96, 96), "And again, with another question?"])]
    cluster.tokens(conversation, max_tokens=4)
    before = cluster.counter("encoder", "vision_tower_images_total")
    responses = cluster.generate(chat_request(again, max_tokens=4))
    assert cluster.counter("encoder", "vision_tower_images_total") == before
    notes = {span.name: span.note for span in responses[-1].finished.timeline}
    assert notes["encode"] == "cached"


def test_equal_pictures_in_flight_run_the_tower_once(cluster: Cluster) -> None:
    conversation: Conversation = [("user", [picture(101, 96, 96), picture(101, 96, 96), "Same?"])]
    before = cluster.counter("encoder", "vision_tower_images_total")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: cluster.tokens(conversation, max_tokens=8), range(8)))
    assert cluster.counter("encoder", "vision_tower_images_total") == before + 1
    assert all(answer == answers[0] for answer in answers)


def test_text_alone_never_meets_an_encoder(cluster: Cluster) -> None:
    before = dict(cluster.load("encoder").counters)
    responses = cluster.generate(chat_request(CONVERSATIONS["no image"], max_tokens=4))
    assert dict(cluster.load("encoder").counters) == before
    assert "encode" not in {span.name for span in responses[-1].finished.timeline}


def test_the_usage_says_what_of_a_prompt_was_cached(cluster: Cluster) -> None:
    """All full blocks but the one that the last token is in, the picture's among them; another picture's are not."""
    words = "All of this prompt lies in the cache the second time it is asked."
    usages, answers = [], []
    for seed in (103, 103, 104):
        responses = cluster.generate(chat_request([("user", [picture(seed, 96, 96), words])], max_tokens=6))
        usages.append(responses[-1].finished.usage)
        answers.append([token for response in responses for token in response.token_ids])
    first, again, other = usages
    assert again.cached_tokens == (first.prompt_tokens - 1) // 16 * 16 > first.image_tokens
    assert first.cached_tokens == other.cached_tokens < again.cached_tokens
    assert answers[0] == answers[1] != answers[2]


def test_the_timeline_names_every_stage(cluster: Cluster) -> None:
    responses = cluster.generate(chat_request([("user", [picture(102, 96, 96), "Now?"])], max_tokens=4))
    spans = {span.name: span for span in responses[-1].finished.timeline}
    for name in ("encode", "ec_save", "ec_load", "prefill", "kv_transfer", "decode"):
        assert spans[name].end_s >= spans[name].start_s > 0, name
    assert spans["encode"].start_s <= spans["prefill"].start_s <= spans["decode"].start_s


def test_an_idle_cluster_takes_no_processor_time(cluster: Cluster) -> None:
    """A loop that never waits would answer every other test as well."""
    cluster.tokens(CONVERSATIONS["one image"], max_tokens=4)
    cluster.wait_empty()
    engines = [psutil.Process(cluster.info(stage).engine_pid) for stage in ("encoder", "prefill", "decode")]
    processes = engines + [psutil.Process(pid) for pid in cluster.local.pids.values()]

    def used_s() -> list[float]:
        return [process.cpu_times().user + process.cpu_times().system for process in processes]

    before = used_s()
    time.sleep(1.0)  # what is measured is a stretch of time in which nothing happens
    assert max(after - earlier for after, earlier in zip(used_s(), before, strict=True)) < 0.5


def test_the_first_token_comes_before_decode(cluster: Cluster) -> None:
    stream = cluster.router.Generate(chat_request(CONVERSATIONS["one image"]), timeout=30)
    first = next(iter(stream))
    assert len(first.token_ids) == 1
    stream.cancel()
    cluster.wait_empty()


def test_sampling_is_the_same_for_the_same_seed(cluster: Cluster) -> None:
    conversation = CONVERSATIONS["one image"]
    warm = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "max_tokens": 24}
    first = cluster.tokens(conversation, seed=5, **warm)
    assert cluster.tokens(conversation, seed=5, **warm) == first
    assert cluster.tokens(conversation, seed=6, **warm) != first


def test_stop_tokens_end_the_answer(cluster: Cluster) -> None:
    conversation = CONVERSATIONS["one image"]
    free = cluster.tokens(conversation, max_tokens=32)
    stop = free[10]
    responses = cluster.generate(chat_request(conversation, max_tokens=32, stop_token_ids=[stop]))
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens == free[: free.index(stop) + 1]
    assert responses[-1].finished.finish_reason == 1
    later = cluster.tokens(conversation, max_tokens=32, stop_token_ids=[stop], min_tokens=20)
    assert len(later) >= 20
    assert stop not in later[:20]


def test_the_first_token_can_be_the_last(cluster: Cluster) -> None:
    before = cluster.counter("decode", "generation_tokens_total")
    assert len(cluster.tokens(CONVERSATIONS["one image"], max_tokens=1)) == 1
    assert cluster.counter("decode", "generation_tokens_total") == before


def test_metrics_are_served(cluster: Cluster) -> None:
    cluster.tokens(CONVERSATIONS["one image"], max_tokens=4)
    for stage in ("encoder", "prefill", "decode"):
        with urllib.request.urlopen(f"http://{cluster.local.workers[stage][0].metrics}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for name in ("num_requests_running", "kv_cache_usage_perc", "ec_hits_total", "kv_transfer_bytes_total"):
            assert f"triptych:{name}" in text, (stage, name)
    with urllib.request.urlopen(f"http://{cluster.local.http}/ready", timeout=10) as answer:
        assert answer.status == 200


def test_a_deadline_reaches_every_stage(cluster: Cluster) -> None:
    before, num_tokens = cluster.counter("decode", "generation_tokens_total"), 1500
    for timeout_s in (0.001, 0.01, 0.03, 0.06, 0.1):
        request = chat_request(CONVERSATIONS["no image"], max_tokens=num_tokens)
        with pytest.raises(grpc.RpcError) as caught:
            list(cluster.router.Generate(request, timeout=timeout_s))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_empty()
    assert cluster.counter("decode", "generation_tokens_total") < before + num_tokens, "one went on to its end"


def test_two_hundred_requests_some_cancelled_leave_nothing(cluster: Cluster) -> None:
    """Cancelled before, in and after every stage; the others still answer as they would alone."""
    conversation: Conversation = [("user", [picture(110, 64, 96), "and", picture(111, 96, 64), "?"])]
    expected = cluster.tokens(conversation, max_tokens=24)
    draw = random.Random(1)
    plans = [
        (i, draw.random() < 0.5, draw.choice([0.0, 0.01, 0.03, 0.1, 0.3]), draw.randint(0, 12)) for i in range(200)
    ]

    def one(plan: tuple[int, bool, float, int]) -> list[int] | None:
        number, cancels, delay_s, after_tokens = plan
        # Some with pictures of their own, so that cancels meet the encoder at work.
        asked = conversation if number % 4 else [("user", [picture(1000 + number, 64, 64), "?"])]
        stream = cluster.router.Generate(chat_request(asked, max_tokens=24), timeout=60)
        timer = threading.Timer(delay_s, stream.cancel) if cancels and after_tokens < 4 else None
        if timer:
            timer.start()
        tokens: list[int] = []
        try:
            for response in stream:
                tokens += response.token_ids
                if cancels and len(tokens) > after_tokens:
                    stream.cancel()
        except grpc.RpcError as error:
            if not cancels or error.code() is not grpc.StatusCode.CANCELLED:
                raise
            return None
        finally:
            if timer:
                timer.cancel()
        return tokens if asked is conversation else None

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, plans))
    whole = [answer for answer in answers if answer is not None]
    assert len(whole) > 50
    assert all(answer == expected for answer in whole)
    cluster.wait_empty()
    cluster.assert_no_failures()


def test_a_restarted_encoder_finds_what_was_stored(cluster: Cluster, reference: Reference) -> None:
    conversation: Conversation = [("user", [picture(120, 96, 96), "Still there?"])]
    expected = reference.generate(conversation, 16)
    assert cluster.tokens(conversation, max_tokens=16) == expected
    cluster.local.restart("encoder", 0)
    cluster.wait_serving(conversation)
    assert cluster.tokens(conversation, max_tokens=16) == expected
    assert cluster.counter("encoder", "vision_tower_images_total") == 0


def test_a_connector_from_a_module_of_a_stranger(tiny_model: Path, tmp_path: Path, reference: Reference) -> None:
    conversation = CONVERSATIONS["three images in a row"]
    local = LocalCluster(
        tiny_model,
        service_args=[
            "--dtype=float32",
            "--max-model-len=1024",
            "--ec-connector=FolderConnector",
            "--ec-connector-module-path=tests.e2e.plugin_connector",
            f'--ec-connector-extra-config={{"folder": "{tmp_path / "items"}"}}',
        ],
        log_dir=tmp_path / "logs",
    )
    with local:
        plugged = Cluster(local)
        assert plugged.tokens(conversation, max_tokens=16) == reference.generate(conversation, 16)
        assert plugged.info("encoder").ec_connector == "FolderConnector"
        assert len(list((tmp_path / "items").iterdir())) == 3
        plugged.wait_empty()
        plugged.assert_no_failures()
