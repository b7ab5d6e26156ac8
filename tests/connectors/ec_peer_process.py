"""The encoder of the peer tests that need another process."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from connectors.ec.peer import ECPeerConnector
from core.types import ECRole
from tests.connectors.support import DEADLINE_S, ECSides, key, random_bits


def serve_items(pipe: Connection, num_items: int, num_rows: int, width: int, port: int) -> None:
    """Hold items 1 to `num_items`, send their sources and the bytes of the first one; serve until killed."""
    sides = ECSides(ECPeerConnector, {"port": port}, ECRole.PRODUCER, num_rows=1, width=width)
    sources, raw = [], b""
    for n in range(1, num_items + 1):
        embeds = random_bits(num_rows, width, torch.float32)
        raw = raw or embeds.view(torch.uint8).numpy().tobytes()
        output = sides.save(key(n), embeds)
        assert output.finished_saving == [key(n)], output
        sources.append(sides.scheduler.item_source(key(n)))
    pipe.send((sources, raw))
    threading.Event().wait()


class Encoder:
    """An encoder in a process of its own, with items 1, 2, … of `num_rows`."""

    def __init__(self, num_items: int, num_rows: int, port: int = 0) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = spawn.Pipe()
        self.process: BaseProcess = spawn.Process(
            target=serve_items, args=(theirs, num_items, num_rows, 6, port), daemon=True
        )
        self.process.start()
        theirs.close()

    def ready(self) -> tuple[list[str], bytes]:
        assert self.pipe.poll(200)
        sources, raw = self.pipe.recv()
        return sources, raw

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        self.pipe.close()
