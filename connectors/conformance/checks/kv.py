"""KV connectors: blocks arrive bit for bit, leases end, and a pull that cannot succeed fails with a reason."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import torch

from connectors.conformance.checks.registry import check
from connectors.conformance.ends import FailedError, expect
from connectors.conformance.kit import Kit
from connectors.conformance.kv_engine import LAYOUT, KVEngine, KVProducerProcess
from core.errors import IncompatibleError, InvalidRequestError
from core.types import KVRole

_LEASE_S = 1.0
#: Forged handles that no check of the scheduler side refuses, and that are tried out.
_MAX_ACCEPTED = 4


@contextlib.contextmanager
def _pair(kit: Kit, **given: object) -> Iterator[tuple[KVEngine, KVEngine]]:
    """A producer and a consumer, closed at the end."""
    producer = KVEngine(kit.factory, KVRole.PRODUCER, kit.extra(), **given)  # type: ignore[arg-type]
    try:
        consumer = KVEngine(kit.factory, KVRole.CONSUMER, kit.extra(), **given)  # type: ignore[arg-type]
    except BaseException:
        producer.close()
        raise
    yield producer, consumer
    consumer.check_blocks()
    consumer.close()
    producer.close()


def _must_pull(producer: KVEngine, consumer: KVEngine, request_id: str, sources: list[int], targets: list[int]) -> None:
    handle = producer.lease(request_id, sources)
    tokens = consumer.call(consumer.scheduler.get_num_new_matched_tokens, handle)
    expect(tokens == len(sources) * consumer.layout.block_size, f"the handle brings {tokens} tokens")
    consumer.pull(request_id, handle, targets)
    reason = consumer.pulled(request_id)
    expect(not reason, f"a pull failed: {reason}")
    right = torch.equal(consumer.take(targets), producer.blocks.view(torch.uint8)[sources])
    expect(right, "a pull was reported as finished and the blocks are wrong")
    expect(not producer.lease_ended(request_id), "a lease whose blocks were pulled ended by time")


@check("kv/round_trip")
def _round_trip(kit: Kit) -> None:
    """Blocks of every dtype arrive bit for bit, one or many, scattered, and their lease ends."""
    for dtype in ("float32", "bfloat16", "float16"):
        with _pair(kit, layout=msgspec.structs.replace(LAYOUT, dtype=dtype)) as (producer, consumer):
            _must_pull(producer, consumer, "one", [7], [3])
            _must_pull(producer, consumer, "many", list(range(50, 10, -1)), list(range(5, 45)))
            _must_pull(producer, consumer, "one", [7], [3])  # the same id again, after its end


@check("kv/many_at_once")
def _many(kit: Kit) -> None:
    """Sixteen requests at once arrive, each reported once."""
    with _pair(kit) as (producer, consumer):
        blocks = {f"r{n}": [4 * n, 4 * n + 1, 4 * n + 2] for n in range(16)}
        for request_id, block_ids in blocks.items():
            consumer.pull(request_id, producer.lease(request_id, block_ids), block_ids[::-1])
        for request_id, block_ids in blocks.items():
            reason = consumer.pulled(request_id)
            expect(not reason, f"a pull failed: {reason}")
            right = torch.equal(consumer.take(block_ids[::-1]), producer.blocks.view(torch.uint8)[block_ids])
            expect(right, "a pull was reported as finished and the blocks are wrong")
            producer.lease_ended(request_id)


@check("kv/lease_expires")
def _lease_expires(kit: Kit) -> None:
    """A lease that nobody uses ends by time and says so; a pull after that fails with a reason."""
    producer = KVEngine(kit.factory, KVRole.PRODUCER, {**kit.extra(), **kit.ttl(_LEASE_S)})
    consumer = KVEngine(kit.factory, KVRole.CONSUMER, {**kit.extra(), **kit.time_limit_or_nothing(2.0)})
    handle = producer.lease("r", [1, 2])
    expect(producer.lease_ended("r", _LEASE_S + 5.0), "a lease that nobody used is not reported as expired")
    expect(producer.worker.num_leases() == 0, "a lease that ended still pins blocks")
    consumer.pull("r", handle, [3, 4])
    expect(consumer.pulled("r"), "blocks were pulled whose lease had ended")
    consumer.take([3, 4])
    _must_pull(producer, consumer, "again", [1], [1])
    consumer.close()
    producer.close()


@check("kv/released")
def _released(kit: Kit) -> None:
    """A lease that is given up ends at once, not by time; unknown ids are ignored."""
    with _pair(kit) as (producer, consumer):
        handle = producer.lease("r", [1, 2])
        for request_id in ("never seen", "r"):
            producer.call(producer.scheduler.release, request_id)
        producer.step()
        expect(not producer.lease_ended("r", 5.0), "a lease that was given up is reported as expired")
        consumer.pull("r", handle, [3, 4])
        expect(consumer.pulled("r"), "blocks were pulled whose lease had been given up")
        consumer.take([3, 4])


@check("kv/cancelled")
def _cancelled(kit: Kit) -> None:
    """A pull that is cancelled is reported once, whichever way, and its blocks are left alone afterwards."""
    with _pair(kit) as (producer, consumer):
        for n in range(8):
            request_id = f"r{n}"
            consumer.pull(request_id, producer.lease(request_id, list(range(40))), list(range(40)))
            time.sleep(kit.random.uniform(0.0, 0.01))
            consumer.call(consumer.scheduler.cancel_recv, request_id)
            consumer.step()
            consumer.pulled(request_id)
            consumer.take(list(range(40)))
            producer.call(producer.scheduler.release, request_id)
            producer.step()
            producer.lease_ended(request_id)
        consumer.call(consumer.scheduler.cancel_recv, "never seen")
        consumer.step()
        time.sleep(0.2)
        consumer.poll()
        _must_pull(producer, consumer, "after", [1], [1])


@check("kv/other_layout")
def _other_layout(kit: Kit) -> None:
    """Blocks of another model, dtype or shape are refused with both values, or fail; none are copied."""
    changes = {"model": "n" * 64, "dtype": "bfloat16", "num_layers": 4, "block_size": 8, "num_kv_heads": 1}
    for field, value in changes.items():
        producer = KVEngine(kit.factory, KVRole.PRODUCER, kit.extra())
        layout = msgspec.structs.replace(LAYOUT, **{field: value})
        consumer = KVEngine(kit.factory, KVRole.CONSUMER, kit.extra(), layout=layout)
        handle = producer.lease("r", [1])
        with contextlib.suppress(IncompatibleError, InvalidRequestError):
            consumer.scheduler.get_num_new_matched_tokens(handle)
            consumer.pull("r", handle, [1])
            expect(consumer.pulled("r"), f"blocks of another {field} were pulled")
        consumer.close()
        producer.close()


@check("kv/forged_handles", limit_s=60)
def _forged(kit: Kit) -> None:
    """A handle that was made up or changed on the way is refused or fails, or still brings the right blocks."""
    producer = KVEngine(kit.factory, KVRole.PRODUCER, kit.extra())
    consumer = KVEngine(kit.factory, KVRole.CONSUMER, {**kit.extra(), **kit.time_limit_or_nothing(1.0)})
    params = producer.lease("r", [1, 2]).params
    forged = [params[:n] for n in (0, 1, len(params) // 2)]
    forged += [params[:n] + bytes([params[n] ^ 1 << n % 8]) + params[n + 1 :] for n in range(0, len(params), 7)]
    num_accepted = 0
    for n, bad in enumerate(forged):
        handle = msgspec.structs.replace(producer.lease(f"r{n}", [1, 2]), params=bad)
        try:
            consumer.scheduler.get_num_new_matched_tokens(handle)
        except (IncompatibleError, InvalidRequestError):
            continue
        except Exception as error:
            raise FailedError(f"get_num_new_matched_tokens raised {type(error).__name__}: {error}") from error
        num_accepted += 1
        if num_accepted <= _MAX_ACCEPTED:
            consumer.pull("bad", handle, [3, 4])
            pulled = not consumer.pulled("bad")
            right = torch.equal(consumer.take([3, 4]), producer.blocks.view(torch.uint8)[[1, 2]])
            expect(right or not pulled, "a forged handle brought blocks that are wrong")
    _must_pull(producer, consumer, "good", [1, 2], [3, 4])
    consumer.check_blocks()
    consumer.close()
    producer.close()


@check("kv/producer_killed", limit_s=60)
def _producer_killed(kit: Kit) -> None:
    """After SIGKILL of the producer, and while it is stopped, a pull fails with a reason, within its limit."""
    extra = {**kit.extra(), **kit.time_limit_or_nothing(2.0)}
    consumer = KVEngine(kit.factory, KVRole.CONSUMER, extra)
    for stops in (signal.SIGKILL, signal.SIGSTOP):
        producer = KVProducerProcess(kit.path, kit.factory, kit.extra())
        try:
            os.kill(producer.pid, stops)
            time.sleep(0.05)
            consumer.pull("r", producer.handle, [1, 2, 3])
            expect(consumer.pulled("r"), "blocks of a producer that is gone were pulled")
            consumer.take([1, 2, 3])
        finally:
            producer.kill()
    time.sleep(0.2)
    consumer.check_blocks()
    consumer.close()


@check("kv/close")
def _close(kit: Kit) -> None:
    """Closed in the middle of leases and pulls, both sides end within two seconds, twice, and leave no thread."""
    for _ in range(3):
        producer = KVEngine(kit.factory, KVRole.PRODUCER, kit.extra())
        consumer = KVEngine(kit.factory, KVRole.CONSUMER, kit.extra())
        consumer.pull("r", producer.lease("r", list(range(40))), list(range(40)))
        producer.lease("other", [50])
        consumer.close()
        producer.close()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
    expect(not names, f"threads go on after close: {', '.join(names)}")
