"""The other process of the tests that need two. Run by multiprocessing's spawn, so each function stands by itself."""

from __future__ import annotations

import contextlib
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from connectors.kv.base import KVLayout
from core.types import ECRole, KVRole
from tests.connectors.support import ECPair, KVPair, key, random_bits


def save_one_item(root: str, pipe: Connection) -> None:
    """Save item 1 as bfloat16, send its bytes, and end."""
    pair = ECPair(Path(root), ECRole.PRODUCER, dtype=torch.bfloat16)
    embeds = random_bits(7, 6, torch.bfloat16)
    output = pair.save(key(1), embeds)
    pair.close()
    pipe.send((output.finished_saving, embeds.view(torch.uint8).numpy().tobytes()))


def stop_before_rename(root: str, pipe: Connection) -> None:
    """Begin to save item 1 and stop for ever when all of it is written and nothing is visible yet."""

    def stop(source: object, target: object) -> None:
        pipe.send("written")
        threading.Event().wait()

    os.replace = stop  # type: ignore[assignment]
    pair = ECPair(Path(root), ECRole.PRODUCER)
    pair.worker.save_caches(key(1), random_bits(7, 6, torch.float32))
    threading.Event().wait()


def serve_blocks(pipe: Connection) -> None:
    """Lease blocks 2, 3, 9 and send the handle and their bytes; report when the lease ends."""
    pair = KVPair(KVRole.PRODUCER)
    handle = pair.lease("r", [2, 3, 9])
    pipe.send((handle, pair.blocks[[2, 3, 9]].view(torch.uint8).numpy().tobytes()))
    output = pair.report(60)
    pipe.send((output.finished_sending, output.expired_sending, pair.worker.num_leases()))
    pair.close()


def serve_many_blocks(pipe: Connection, layout: KVLayout, num_blocks: int, block_ids: list[int]) -> None:
    """A cache of known bits (seed 0). For each name that comes, lease `block_ids` and send the handle. Ends with the
    pipe."""
    pair = KVPair(KVRole.PRODUCER, layout, num_blocks=num_blocks)
    torch.manual_seed(0)
    pair.blocks.copy_(random_bits(num_blocks, layout.elements_per_block, torch.float32))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(pair.lease(pipe.recv(), block_ids))
    pair.close()
