"""What an encoder's queue tells of the time that pictures spend in it: autoscalers and dashboards stand on that."""

from __future__ import annotations

import time

import msgspec
import torch

from connectors.ec.base import ECConnectorConfig, ECConnectorOutput, ECSide
from core.types import ECRole, Feature
from engine.encode_queue import EncodeQueue
from engine.encoder_cache_manager import EncoderCacheManager
from engine.protocol import EngineCoreRequest
from engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine.stats import StatsCollector
from tests.engine.gated_connector import NoItems

KEY = "ab" * 32
WAITED_S = 3.0


class Stored(NoItems):
    """A store that has everything."""

    def has_cache_item(self, key: str) -> bool | None:
        return True


def queue_of(connector: type[NoItems], stats: StatsCollector) -> EncodeQueue:
    config = ECConnectorConfig(ECRole.PRODUCER, "0" * 64, torch.float32, 8, {}, lambda: None)
    cache = EncoderCacheManager(64, 32)
    return EncodeQueue(cache, connector(config, ECSide.SCHEDULER), stats, max_batched_embeds=64, where="encoder-0")


def any_room(num_rows: int) -> bool:
    return True


def request(request_id: str, arrival_s: float) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, arrival_s, image=b"a picture", feature=Feature(KEY, 4, (1, 4, 4), 8))


def test_a_picture_is_timed_from_its_arrival_to_the_tower_and_to_the_end() -> None:
    stats = StatsCollector()
    queue = queue_of(NoItems, stats)
    queue.add(request("r", time.time() - WAITED_S))
    queue.schedule(SchedulerOutput(), any_room)
    queue.update(ModelRunnerOutput(prepared=[KEY]))
    assert stats.take_observations() == {}, "nothing has run yet"
    queue.schedule(SchedulerOutput(), any_room)
    (queued_s,) = stats.take_observations()["stage_queue_seconds"]
    assert WAITED_S <= queued_s < WAITED_S + 10
    queue.update(ModelRunnerOutput(encoded={KEY: ""}))
    assert stats.take_observations() == {}, "it is not stored yet"
    done = queue.update(ModelRunnerOutput(ec=ECConnectorOutput(finished_saving={KEY})))
    assert [output.request_id for output in done] == ["r"]
    (whole_s,) = stats.take_observations()["e2e_request_latency_seconds"]
    assert whole_s >= queued_s


def test_one_that_is_stored_never_queued() -> None:
    stats = StatsCollector()
    queue = queue_of(Stored, stats)
    queue.add(request("r", time.time()))
    assert len(queue.schedule(SchedulerOutput(), any_room)) == 1
    assert stats.take_observations().keys() == {"e2e_request_latency_seconds"}


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    stats = StatsCollector()
    queue = queue_of(Stored, stats)
    queue.add(request("r", time.time() + 1000))
    queue.schedule(SchedulerOutput(), any_room)
    assert stats.take_observations()["e2e_request_latency_seconds"] == [0.0]


def test_one_that_a_consumer_could_not_load_is_made_again_whatever_the_store_says() -> None:
    queue = queue_of(Stored, StatsCollector())
    queue.add(request("r", time.time()))
    queue.add(msgspec.structs.replace(request("again", time.time()), reported_missing=True))
    out = SchedulerOutput()
    assert queue.schedule(out, any_room) == []
    assert [image.feature.key for image in out.prepare] == [KEY]
