"""Both sides of a KV connector, driven as an engine drives them, and a producer in a process of its own."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from connectors.conformance.channel import Channel, ChannelError
from connectors.conformance.ends import DTYPES, PAINT, FailedError, RefusedError, expect, payload
from connectors.conformance.engine import SLACK_S
from connectors.conformance.factory import ConnectorFactory
from connectors.conformance.processes import fork, kill
from connectors.kv.base import KVConnectorBase, KVConnectorConfig, KVConnectorOutput, KVLayout, KVSide
from core.errors import ConfigError
from core.types import KVHandle, KVRole

LAYOUT = KVLayout(version=1, model="m" * 64, dtype="float32", num_layers=3, block_size=4, num_kv_heads=2, head_dim=16)
#: Within which a pull or a lease ends, and what a machine under load may add.
LIMIT_S = 15.0
_POLL_S = 0.005
_CLOSE_S = 2.0 + SLACK_S


class KVEngine:
    """One engine's connector over a cache of its own. A producer's blocks are `payload(…)`, a consumer's are painted.
    Used by one thread. Raises FailedError where a rule is broken."""

    def __init__(
        self,
        factory: ConnectorFactory,
        role: KVRole,
        extra: Mapping[str, Any],
        *,
        layout: KVLayout = LAYOUT,
        num_blocks: int = 64,
        name: str = "engine",
    ) -> None:
        self.layout = layout
        self.ended: dict[str, str] = {}  # pulls that ended: the reason, or ""
        self.sent: dict[str, bool] = {}  # leases that ended: whether by time
        self._leased: set[str] = set()
        self._pulling: dict[str, list[int]] = {}
        self._rung = threading.Event()
        self._sides: list[KVConnectorBase] = []
        config = KVConnectorConfig(role, layout, name, extra, self._rung.set)
        try:
            for side in KVSide:
                self._sides.append(self._make(factory, config, side))
            self.scheduler, self.worker = self._sides
            self.blocks = self._make_cache(num_blocks)
            if role.produces:
                self.blocks.copy_(payload(num_blocks, layout.elements_per_block, DTYPES[layout.dtype], "kv", name))
            else:
                self.blocks.view(torch.uint8).fill_(PAINT)
            self.call(self.worker.register_kv_caches, self.blocks)
            self.call(self.scheduler.set_handshake, self.call(self.worker.handshake))
        except BaseException:
            for made in self._sides:
                made.close()
            raise

    def _make(self, factory: ConnectorFactory, config: KVConnectorConfig, side: KVSide) -> KVConnectorBase:
        try:
            return factory.make_kv(config, side)
        except ConfigError as error:
            raise RefusedError(str(error)) from None
        except Exception as error:
            raise FailedError(f"the constructor raised {type(error).__name__}: {error}, not ConfigError") from error

    def _make_cache(self, num_blocks: int) -> torch.Tensor:
        dtype = DTYPES[self.layout.dtype]
        shape = (num_blocks, self.layout.elements_per_block)
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        theirs = self.call(self.worker.allocate_kv_cache, num_bytes, torch.device("cpu"))
        return torch.empty(shape, dtype=dtype) if theirs is None else theirs.view(dtype).view(shape)

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Raises FailedError where it raises anything."""
        try:
            return method(*args)
        except FailedError:
            raise
        except Exception as error:
            name = getattr(method, "__name__", str(method))
            raise FailedError(f"{name} raised {type(error).__name__}: {error}") from error

    def lease(self, request_id: str, block_ids: Sequence[int]) -> KVHandle:
        """Pin blocks, as at the end of a prefill."""
        num_tokens = len(block_ids) * self.layout.block_size
        handle = self.call(self.scheduler.request_finished, request_id, list(block_ids), num_tokens)
        expect(isinstance(handle, KVHandle), f"request_finished returned {type(handle).__name__}, not a KVHandle")
        self._leased.add(request_id)
        self.step()
        return msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=KVHandle)  # it travels

    def pull(self, request_id: str, handle: KVHandle, block_ids: Sequence[int]) -> None:
        """Begin to pull into these blocks, which are the connector's until the report."""
        self._pulling[request_id] = list(block_ids)
        self.call(self.scheduler.update_state_after_alloc, request_id, handle, list(block_ids))
        self.step()

    def step(self) -> None:
        self.call(self.worker.bind_connector_metadata, self.call(self.scheduler.build_connector_meta))
        self.call(self.worker.start_load_kv)
        self.call(self.worker.clear_connector_metadata)

    def poll(self) -> None:
        """`get_finished`, checked."""
        output = self.call(self.worker.get_finished)
        if not isinstance(output, KVConnectorOutput):
            raise FailedError(f"get_finished returned {type(output).__name__}, not KVConnectorOutput")
        for request_id in output.finished_sending:
            expect(request_id in self._leased, f"the lease of {request_id} was reported, which has none (any more)")
            self._leased.discard(request_id)
            self.sent[request_id] = request_id in output.expired_sending
        given_up = dict.fromkeys(output.given_up_recving, "given up")
        for request_id, reason in {**dict.fromkeys(output.finished_recving, ""), **given_up}.items():
            self._end_pull(request_id, reason)
        for request_id, reason in output.failed_recving.items():
            expect(reason, f"the pull of {request_id} failed without a reason")
            if request_id not in given_up:
                self._end_pull(request_id, reason)
        self.call(self.scheduler.update_connector_output, output)

    def _end_pull(self, request_id: str, reason: str) -> None:
        expect(request_id in self._pulling, f"the pull of {request_id} was reported, which is not under way (any more)")
        del self._pulling[request_id]
        self.ended[request_id] = reason

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            self.poll()
            if condition():
                return
            expect(time.monotonic() < deadline_s, f"{what} was not reported within {limit_s:g} s")
            self._rung.wait(_POLL_S)
            self._rung.clear()
            self.step()

    def pulled(self, request_id: str) -> str:
        """How a pull ended: the reason for its failure, or ""."""
        self.wait_for(lambda: request_id in self.ended, f"the pull of {request_id}")
        return self.ended.pop(request_id)

    def lease_ended(self, request_id: str, limit_s: float = LIMIT_S) -> bool:
        """Whether a lease ended by time, once it has."""
        self.wait_for(lambda: request_id in self.sent, f"the end of the lease of {request_id}", limit_s)
        return self.sent.pop(request_id)

    def take(self, block_ids: Sequence[int]) -> torch.Tensor:
        """What lies in these blocks, which are painted again."""
        raw = self.blocks.view(torch.uint8)
        found = raw[list(block_ids)].clone()
        raw[list(block_ids)] = PAINT
        return found

    def check_blocks(self) -> None:
        """Consumer: nothing but blocks of pulls under way was written to."""
        busy = [block for blocks in self._pulling.values() for block in blocks]
        clean = (self.blocks.view(torch.uint8) == PAINT).all(dim=1)
        clean[busy] = True
        expect(bool(clean.all()), "blocks that belong to no pull were written to")

    def close(self) -> None:
        """Both sides, twice."""
        for side in self._sides:
            begin_s = time.monotonic()
            self.call(side.close)
            seconds = time.monotonic() - begin_s
            expect(seconds < _CLOSE_S, f"close of the {side.side} side took {seconds:.1f} s")
            self.call(side.close)


class KVProducerProcess:
    """A producer that has leased blocks 1, 3 and 5 for request "r", in a process that can be stopped and killed."""

    block_ids = (1, 3, 5)

    def __init__(self, path: str, factory: ConnectorFactory, extra: Mapping[str, Any]) -> None:
        self.pid, self._channel = fork(path, "kv_producer", factory=factory, extra=extra)
        try:
            message = self._channel.receive(30.0)
        except ChannelError as error:
            raise FailedError(f"a producer in another process ended: {error}") from None
        if "handle" not in message:
            raise FailedError(f"in another process: {message}")
        self.handle = msgspec.msgpack.decode(base64.b64decode(message["handle"]), type=KVHandle)

    def kill(self) -> None:
        kill(self.pid, self._channel)


def serve_kv_producer(channel: Channel, _path: str, factory: Any, extra: Any) -> None:
    """The other process's whole life."""
    try:
        engine = KVEngine(msgspec.convert(factory, ConnectorFactory), KVRole.PRODUCER, extra)
        handle = engine.lease("r", KVProducerProcess.block_ids)
    except (FailedError, RefusedError) as error:
        channel.send(failed=str(error))
        return
    channel.send(handle=base64.b64encode(msgspec.msgpack.encode(handle)).decode())
    engine.wait_for(lambda: False, "the end of this process", 600.0)
