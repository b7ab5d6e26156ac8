"""What the scheduler tells a KV connector of requests whose blocks are elsewhere, and what it makes of the end."""

from __future__ import annotations

from connectors.kv.base import SAME_HOST, KVConnectorMetadata, KVConnectorOutput
from core.types import KVHandle
from engine.protocol import EngineCoreOutput, ErrorKind
from engine.scheduler_output import ModelRunnerOutput
from tests.engine.harness import Bench

HANDLE = KVHandle("ScriptedPeer", b"", 10)


def orders(bench: Bench, report: KVConnectorOutput | None = None) -> tuple[KVConnectorMetadata, list[EngineCoreOutput]]:
    """One step: what the connector is told, and what the step brings with this report of it."""
    out = bench.scheduler.schedule()
    assert isinstance(out.kv_metadata, KVConnectorMetadata)
    return out.kv_metadata, bench.scheduler.update_from_output(out, ModelRunnerOutput(kv=report or KVConnectorOutput()))


def test_a_handle_is_announced_before_there_is_room_for_its_blocks() -> None:
    bench = Bench(with_kv=True, num_blocks=4)
    bench.add("first", 10, kv=HANDLE, given=1)
    bench.add("second", 10, kv=HANDLE, given=1)
    told, _ = orders(bench)
    assert list(told.expected) == ["first", "second"]
    assert [pull.request_id for pull in told.pulls] == ["first"]


def test_a_request_that_ends_before_its_pull_lets_the_producer_go() -> None:
    bench = Bench(with_kv=True, num_blocks=4)
    bench.add("first", 10, kv=HANDLE, given=1)
    bench.add("second", 10, kv=HANDLE, given=1)
    orders(bench)
    bench.scheduler.abort("second")
    assert bench.scheduler.has_work, "nobody would carry the order to the worker side"
    told, _ = orders(bench)
    assert told.cancels == ["second"]


def test_a_lease_that_the_router_gave_up_ends_the_request_and_counts_as_no_failure() -> None:
    bench = Bench(with_kv=True)
    bench.add("r", 10, kv=HANDLE, given=1)
    orders(bench)
    _, outputs = orders(bench, KVConnectorOutput(given_up_recving=["r"]))
    outputs += orders(bench)[1]
    assert [(output.request_id, output.error_kind) for output in outputs] == [("r", ErrorKind.UNAVAILABLE)]
    assert not bench.scheduler.has_work
    assert bench.kv.pool.num_held == 0
    counters = bench.scheduler.stats.counters
    assert (counters["kv_transfer_failures_total"], counters["kv_recomputations_total"]) == (0, 0)


def test_roads_and_retries_are_counted_and_shown() -> None:
    bench = Bench(with_kv=True)
    for name in "ab":
        bench.add(name, 10, kv=HANDLE, given=1, max_tokens=2)
    orders(bench)
    report = KVConnectorOutput(
        finished_recving=["a", "b"], roads={"a": SAME_HOST, "b": "network"}, num_retries=3, seconds_receiving=[0.1, 0.2]
    )
    orders(bench, report)
    counters = bench.scheduler.stats.counters
    assert (counters["kv_transfers_same_host_total"], counters["kv_transfer_retries_total"]) == (1, 3)
    notes = {name: bench.scheduler._requests[name].spans[-1].note for name in "ab"}
    assert notes == {"a": SAME_HOST, "b": "network"}


def test_where_items_lie_is_known_before_a_pull_fails() -> None:
    """Else a store of peers says that the items of whatever is computed again are not there, and they are encoded
    again for nothing."""
    key = "a" * 64
    bench = Bench(with_kv=True)
    bench.store.stored = {key}
    bench.add("r", 10, [(key, 2, 4)], kv=HANDLE, given=1, source="there")
    bench.step()
    assert bench.store.sources == {key: "there"}
    assert bench.store.lookups == [], "the pull brings what they are for"
    bench.step(pull_failed={"r": "lost"})
    bench.settle()
    assert not bench.last("r").missing
    assert bench.ordered == [key]
    bench.assert_empty()
