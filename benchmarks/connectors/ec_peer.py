"""Items pulled by `ECPeerConnector` from another process's memory, beside bare ZeroMQ in frames of the same size.

Both halves of the connector take part, from the scheduler's order to the worker's report, one thread for loads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection as Pipe

import numpy as np
import torch

from benchmarks.connectors import bare_zmq
from benchmarks.connectors.bare_zmq import BareZMQ, Form
from benchmarks.connectors.children import Child
from benchmarks.connectors.items import DTYPE, NAMESPACE, WIDTH, empty_item, expect_same, key_of, random_item
from benchmarks.connectors.measuring import Comparison, Contender, Row, Settings, measure
from connectors.ec import peer_connection
from connectors.ec.base import BufferSlice, ECConnectorConfig, ECConnectorOutput, ECItem, ECSide
from connectors.ec.peer import ECPeerConnector
from connectors.ec.store import CHUNK_BYTES
from core.types import ECRole

_TIMEOUT_S = 60.0


class _Engine:
    """Both sides over a buffer of one item."""

    def __init__(self, role: ECRole, buffer: torch.Tensor) -> None:
        self._rung = threading.Event()
        extra = {"num_threads": 1, "timeout_s": _TIMEOUT_S, "capacity_bytes": buffer.nbytes + (1 << 20)}
        config = ECConnectorConfig(role, NAMESPACE, DTYPE, WIDTH, extra, self._rung.set)
        self.buffer = buffer
        self._key = key_of(buffer.nbytes)
        self.scheduler = ECPeerConnector(config, ECSide.SCHEDULER)
        self.worker = ECPeerConnector(config, ECSide.WORKER)
        self.worker.register_caches(buffer)
        self.scheduler.set_handshake(self.worker.handshake())

    def save(self) -> str:
        """Save the buffer; where it can be had."""
        self.worker.save_caches(self._key, self.buffer)
        self._report()
        return self.scheduler.item_source(self._key)

    def learn(self, source: str) -> None:
        self.scheduler.add_item_source(self._key, source)

    def load(self) -> None:
        num_rows = len(self.buffer)
        self.scheduler.update_state_after_alloc(ECItem(self._key, num_rows), BufferSlice(0, num_rows))
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta())
        self.worker.start_load_caches()
        self.worker.clear_connector_metadata()
        self._report()

    def _report(self) -> ECConnectorOutput:
        """The next one. Raises RuntimeError for a failure of any kind."""
        while True:
            if not self._rung.wait(_TIMEOUT_S):
                raise RuntimeError("an order to the connector did not end")
            self._rung.clear()
            output = self.worker.get_finished()
            if output.failed_loading or output.failed_saving or any(self.worker.take_counters().values()):
                raise RuntimeError(f"a load or save that should have gone well: {output}")
            if output:
                self.scheduler.update_connector_output(output)
            if output.finished_loading or output.finished_saving:
                return output

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def serve(pipe: Pipe) -> None:
    """The encoder's process: holds an item of each size that it is told, one at a time, and says where."""
    torch.set_num_threads(1)
    engine: _Engine | None = None
    with contextlib.suppress(EOFError):
        while (size_bytes := pipe.recv()) is not None:
            if engine is not None:
                engine.close()
            engine = _Engine(ECRole.PRODUCER, random_item(size_bytes))
            pipe.send(engine.save())
    if engine is not None:
        engine.close()


def rows(sizes: Sequence[int], settings: Settings) -> Iterator[Row]:
    with Child(serve) as encoder, Child(bare_zmq.serve) as sender, BareZMQ(sender) as bare:
        for size_bytes in sizes:
            yield from _of_size(size_bytes, encoder, bare, settings.rounds)


def _of_size(size_bytes: int, encoder: Child, bare: BareZMQ, rounds: int) -> list[Row]:
    engine = _Engine(ECRole.CONSUMER, empty_item(size_bytes))
    try:
        engine.learn(encoder.ask(size_bytes))
        engine.load()
        expect_same("a pull from an encoder", engine.buffer, random_item(size_bytes))
        bare.prepare(size_bytes)
        received = np.zeros(size_bytes, dtype=np.uint8)
        form = Form(min(size_bytes, CHUNK_BYTES), 1, peer_connection._WINDOW)
        places = range(-(-size_bytes // CHUNK_BYTES))
        return measure(
            size_bytes,
            {
                "ours": Contender(engine.load),
                "bare ZeroMQ": Contender(lambda: bare.receive(received, places, form)),
            },
            [Comparison("EC peer load", "ours", "bare ZeroMQ", None)],
            rounds,
        )
    finally:
        engine.close()
