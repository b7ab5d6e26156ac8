"""What the connector tests share: configurations, and waiting for a connector's `notify` instead of sleeping."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from connectors.ec.base import BufferSlice, ECConnectorBase, ECConnectorConfig, ECConnectorOutput, ECItem, ECSide
from connectors.ec.shared_storage import ECSharedStorageConnector
from connectors.kv.base import BlockMover, KVConnectorConfig, KVConnectorOutput, KVLayout, KVSide
from connectors.kv.peer import KVPeerConnector
from core.types import ECRole, KVHandle, KVRole

NAMESPACE = "0123456789abcdef" * 4
#: Of what is to happen; far longer than it takes on a machine that has other work to do as well.
DEADLINE_S = 30.0
LAYOUT = KVLayout(version=1, model="m" * 64, dtype="float32", num_layers=2, block_size=4, num_kv_heads=2, head_dim=8)


_SIDES = ("dtype", "width", "num_rows", "namespace", "device")  # of ECSides; the rest is extra config


def key(n: int) -> str:
    return f"{n:064x}"


class Bell:
    """A `notify` that can be waited for."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def __call__(self) -> None:
        self._rung.set()

    def wait_for(self, value: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """The first result of `value` that is neither None nor false; asked anew whenever the bell rings."""
        end_s = time.monotonic() + deadline_s
        while not (result := value()):
            left_s = end_s - time.monotonic()
            assert left_s > 0, "nothing happened in time"
            self._rung.wait(left_s)
            self._rung.clear()
        return result


def poll_until(condition: Callable[[], bool]) -> None:
    """For what nothing tells of: ask every few milliseconds."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "nothing happened in time"
        time.sleep(0.002)  # nothing tells of it


def random_bits(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern is fair, NaNs with payloads too: a store moves bytes, not numbers."""
    return torch.randint(0, 256, (rows, width * dtype.itemsize), dtype=torch.uint8).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class ECSides:
    """Both sides of an EC connector, driven as an engine drives them."""

    def __init__(
        self,
        cls: type[ECConnectorBase],
        extra: Mapping[str, Any],
        role: ECRole = ECRole.BOTH,
        *,
        dtype: torch.dtype = torch.float32,
        width: int = 6,
        num_rows: int = 32,
        namespace: str = NAMESPACE,
        device: str = "cpu",
    ) -> None:
        self.bell = Bell()
        config = ECConnectorConfig(role, namespace, dtype, width, extra, self.bell)
        self.scheduler = cls(config, ECSide.SCHEDULER)
        self.worker = cls(config, ECSide.WORKER)
        self.buffer = torch.zeros(num_rows, width, dtype=dtype, device=device)
        self.worker.register_caches(self.buffer)
        self.scheduler.set_handshake(self.worker.handshake())

    def look_up(self, key: str) -> bool:
        answers: list[bool] = []

        def ask() -> bool:
            answer = self.scheduler.has_cache_item(key)
            if answer is not None:
                answers.append(answer)
            return bool(answers)

        self.bell.wait_for(ask)
        return answers[0]

    def report(self) -> ECConnectorOutput:
        """The next report of an order; reports of nothing else are only handed to the scheduler side."""

        def ended() -> ECConnectorOutput | None:
            output = self._hand_over()
            orders = output.finished_saving or output.failed_saving or output.finished_loading or output.failed_loading
            return output if orders else None

        output: ECConnectorOutput = self.bell.wait_for(ended)
        return output

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """While reports, of whatever kind, are handed to the scheduler side."""

        def met() -> bool:
            self._hand_over()
            return condition()

        self.bell.wait_for(met)

    def _hand_over(self) -> ECConnectorOutput:
        output = self.worker.get_finished()
        if output:
            self.scheduler.update_connector_output(output)
        return output

    def save(self, key: str, embeds: torch.Tensor) -> ECConnectorOutput:
        self.worker.save_caches(key, embeds)
        return self.report()

    def load(self, key: str, start: int, num_rows: int) -> ECConnectorOutput:
        self.scheduler.update_state_after_alloc(ECItem(key, num_rows), BufferSlice(start, num_rows))
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta())
        self.worker.start_load_caches()
        self.worker.clear_connector_metadata()
        return self.report()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


class ECPair(ECSides):
    """Both sides of an ECSharedStorageConnector."""

    def __init__(self, root: Path, role: ECRole = ECRole.BOTH, **given: Any) -> None:
        extra = {key: given.pop(key) for key in list(given) if key not in _SIDES}
        super().__init__(ECSharedStorageConnector, {"shared_storage_path": str(root), **extra}, role, **given)


class KVPair:
    """Both sides of a KVPeerConnector over a cache of its own, driven as an engine drives them."""

    def __init__(
        self,
        role: KVRole,
        layout: KVLayout = LAYOUT,
        *,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 16,
        device: str = "cpu",
        cls: type[KVPeerConnector] = KVPeerConnector,
        mover: BlockMover | None = None,
        **extra: Any,
    ) -> None:
        self.bell = Bell()
        config = KVConnectorConfig(role, layout, "instance-0", extra, self.bell)
        self.scheduler = cls(config, KVSide.SCHEDULER)
        self.worker = cls(config, KVSide.WORKER)
        shape = (num_blocks, layout.elements_per_block)
        memory = self.worker.allocate_kv_cache(math.prod(shape) * dtype.itemsize, torch.device(device))
        if memory is None:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.blocks = memory.view(dtype).view(shape)
        if role.produces:
            self.blocks.copy_(random_bits(num_blocks, layout.elements_per_block, dtype))
        self.worker.block_mover = mover
        self.worker.register_kv_caches(self.blocks)
        self.scheduler.set_handshake(self.worker.handshake())

    @property
    def address(self) -> str:
        """Where it serves: `tcp://host:port`."""
        return self.worker.handshake().partition(" ")[0]

    def step(self) -> None:
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta())
        self.worker.start_load_kv()
        self.worker.clear_connector_metadata()

    def lease(self, request_id: str, block_ids: list[int]) -> KVHandle:
        handle = self.scheduler.request_finished(
            request_id, block_ids, len(block_ids) * self.worker.config.layout.block_size
        )
        self.step()
        return handle

    def pull(self, request_id: str, handle: KVHandle, block_ids: list[int]) -> None:
        self.scheduler.update_state_after_alloc(request_id, handle, block_ids)
        self.step()

    def report(self, deadline_s: float = DEADLINE_S) -> KVConnectorOutput:
        output: KVConnectorOutput = self.bell.wait_for(self.worker.get_finished, deadline_s)
        return output

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def num_parked(prefill: KVPair) -> int:
    """Requests that wait at the producer for their lease."""
    assert prefill.worker._server is not None
    return len(prefill.worker._server._parked)


def connector_threads() -> list[str]:
    """Names of this process's connector threads that run now."""
    return [t.name for t in threading.enumerate() if t.name.startswith(("ec-", "kv-"))]


def with_params(handle: KVHandle, changes: Mapping[str, object]) -> KVHandle:
    """A forged handle: `params` with some fields replaced."""
    params = msgspec.msgpack.decode(handle.params)
    return msgspec.structs.replace(handle, params=msgspec.msgpack.encode({**params, **changes}))
