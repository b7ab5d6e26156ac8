"""Each connector's store is stopped, filled, corrupted and restarted under load: every request is answered rightly or
ends in a named error within its deadline, and afterwards items are found again."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.cluster import LocalCluster
from connectors.conformance import Damage, Harness, NotTriedError, StoredItem
from connectors.conformance.harnesses.redis import RedisHarness
from connectors.conformance.harnesses.shared_memory import SharedMemoryHarness
from connectors.conformance.harnesses.shared_storage import SharedStorageHarness
from core.keys import content_hash, item_key
from tests.e2e.conftest import Cluster, chat_request
from tests.pictures import picture
from tests.reference import Reference

pytestmark = pytest.mark.faults("stores that fail")

DEADLINE_S = 20.0
NUM_TOKENS = 3
PICTURES = [picture(500 + i, 64, 64) for i in range(8)]
#: Codes that say whose fault it was, as against INTERNAL and UNKNOWN.
NAMED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
}


class TieredHarness(RedisHarness):
    """Shared memory before Redis; the faults are Redis'."""

    def extra(self) -> Mapping[str, Any]:
        arena = {"path": str(self.folder / "arena"), "capacity_bytes": 1 << 20}
        return {
            "tiers": [
                {"connector": "ECSharedMemoryConnector", "extra": arena},
                {"connector": "ECRedisConnector", "extra": {**super().extra(), "timeout_s": 2.0}},
            ]
        }

    def time_limit(self, seconds: float) -> Mapping[str, Any]:
        return {}


CONNECTORS: dict[str, type[Harness]] = {
    "ECSharedStorageConnector": SharedStorageHarness,
    "ECRedisConnector": RedisHarness,
    "ECSharedMemoryConnector": SharedMemoryHarness,
    "ECTieredConnector": TieredHarness,
}


class Load:
    """Requests about the pictures without a pause, from three threads, for as long as the context lasts. Each picture
    comes with a new text, and neither KV nor the encoder buffer keeps what would make a load unnecessary."""

    def __init__(self, there: Cluster, expected: Callable[[int], list[int]]) -> None:
        self._there = there
        self._expected = expected
        self._stop = threading.Event()
        self._done = threading.Condition()
        self.num_done = 0
        self.problems: list[str] = []
        self.errors: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(3)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)
            assert not thread.is_alive(), "a request hangs"

    def wait_for(self, count: int) -> None:
        """Until so many more have ended."""
        with self._done:
            wanted = self.num_done + count
            assert self._done.wait_for(lambda: self.num_done >= wanted, 5 * DEADLINE_S), "requests hang"

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        while not self._stop.is_set():
            which = draw.randrange(len(PICTURES))
            begin_s = time.monotonic()
            try:
                right = ask(self._there, which) == self._expected(which)
                if not right:
                    self.problems.append(f"picture {which}: a wrong answer")
            except grpc.RpcError as error:
                self.errors[f"{error.code().name}: {error.details()}"] += 1
                if error.code() not in NAMED or not error.details():
                    self.problems.append(f"picture {which}: {error.code().name}: {error.details()}")
            if time.monotonic() - begin_s > DEADLINE_S + 2:
                self.problems.append(f"picture {which}: {time.monotonic() - begin_s:.1f} s")
            with self._done:
                self.num_done += 1
                self._done.notify_all()


def ask(there: Cluster, which: int) -> list[int]:
    request = chat_request([("user", [PICTURES[which], "What is this?"])], max_tokens=NUM_TOKENS)
    return [token for response in there.router.Generate(request, timeout=DEADLINE_S) for token in response.token_ids]


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Callable[[int], list[int]]:
    answers = [reference.generate([("user", [image, "What is this?"])], NUM_TOKENS) for image in PICTURES]
    assert len({tuple(answer) for answer in answers}) > 1, "answers depend on the picture"
    return lambda which: answers[which]


def start(model: Path, folder: Path, connector: str, extra: Mapping[str, Any], **more: Any) -> LocalCluster:
    return LocalCluster(
        model,
        service_args=[
            "--dtype=float32",
            "--max-model-len=512",
            "--no-enable-prefix-caching",
            "--encoder-cache-bytes=12288",  # three items of the pictures'
            f"--ec-connector={connector}",
            f"--ec-connector-extra-config={json.dumps(extra)}",
        ],
        log_dir=folder / "logs",
        **more,
    )


def assert_items_are_found(there: Cluster, expected: Callable[[int], list[int]]) -> None:
    """Once every item was made anew, the tower has nothing to do and nothing fails."""
    deadline_s = time.monotonic() + 60
    while True:
        watched = ("vision_tower_images_total", "ec_load_failures_total", "ec_save_failures_total")
        before = [there.counter(stage, name) for stage in ("encoder", "prefill") for name in watched]
        assert all(ask(there, which) == expected(which) for which in range(len(PICTURES)))
        if before == [there.counter(stage, name) for stage in ("encoder", "prefill") for name in watched]:
            return
        assert time.monotonic() < deadline_s, "items are not found again"


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_store_may_stop_fill_and_spoil_what_it_holds(
    tiny_model: Path, tmp_path: Path, expected: Callable[[int], list[int]], connector: str
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    harness = CONNECTORS[connector](folder, {})
    try:
        harness.open()
        extra = {**harness.extra(), **harness.time_limit(2.0)}
        with start(tiny_model, tmp_path, connector, extra) as local:
            there = Cluster(local)
            assert_items_are_found(there, expected)
            there.assert_no_failures()
            namespace = there.info("encoder").namespace_digest
            items = [StoredItem(namespace, item_key(content_hash(image), namespace)) for image in PICTURES]
            faults: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
                ("spoilt", lambda: spoil(harness, items), lambda: None),
                ("stopped", harness.stop, harness.start),
                ("full", harness.fill, harness.free),
                ("stopped again", harness.stop, harness.start),
            ]
            with Load(there, expected) as load:
                load.wait_for(6)
                for _, begin, end in faults:
                    try:
                        begin()
                    except NotTriedError:
                        continue
                    load.wait_for(12)
                    end()
                    load.wait_for(6)
            assert load.problems == [], load.errors
            there.wait_empty()
            assert_items_are_found(there, expected)
    finally:
        harness.restore()
        harness.close()


def spoil(harness: Harness, items: list[StoredItem]) -> None:
    num_spoilt = 0
    for item, how in zip(items[:4], itertools.cycle([Damage.FLIPPED_BIT, Damage.TRUNCATED, Damage.GARBAGE])):
        try:
            harness.damage(item, how, None)
            num_spoilt += 1
        except (LookupError, OSError, AssertionError, NotTriedError):
            continue  # it was evicted, or lost in the fault before
    assert num_spoilt, "nothing was there to be spoilt"


def test_an_encoder_that_holds_the_items_itself_may_die(
    tiny_model: Path, tmp_path: Path, expected: Callable[[int], list[int]]
) -> None:
    extra = {"timeout_s": 2.0, "lookup_timeout_s": 2.0, "lease_s": 2.0}  # a drain waits for leases
    with start(tiny_model, tmp_path, "ECPeerConnector", extra, encoders=2) as local:
        there = Cluster(local)
        assert_items_are_found(there, expected)
        there.assert_no_failures()
        with Load(there, expected) as load:
            load.wait_for(6)
            for index in (0, 1):
                local.restart("encoder", index)
                load.wait_for(12)
        assert load.problems == [], load.errors
        there.wait_empty()
        assert_items_are_found(there, expected)


def test_without_any_store_the_encoder_gives_its_items_away_itself(
    tiny_model: Path, tmp_path: Path, expected: Callable[[int], list[int]]
) -> None:
    """A Redis that was never there: each item goes the way round, and the counters say so."""
    extra = {"url": "redis://127.0.0.1:1", "timeout_s": 0.5, "breaker_failures": 1}
    with start(tiny_model, tmp_path, "ECRedisConnector", extra) as local:
        there = Cluster(local)
        assert [ask(there, which) for which in range(4)] == [expected(which) for which in range(4)]
        assert there.counter("encoder", "ec_store_tier_failures_total") >= 4
        assert there.counter("encoder", "ec_save_failures_total") == 0
        assert there.counter("encoder", "ec_store_breaker_opens_total") >= 1
