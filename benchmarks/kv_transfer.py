"""Pulls of KV blocks between two processes on this host, beside what the machine can do in the same run.

For each size of a block, `--mib` MiB of blocks that lie scattered in both caches are pulled over the network (loopback)
and through shared memory, checksums verified both times. Beside them: the same bytes in messages of the same size over
bare ZeroMQ, received and thrown away, and one memcpy of as many bytes. The rounds of the four take turns, and the best
of each counts. Every process computes with one thread.

    python -m benchmarks.kv_transfer [--mib N] [--block-kib 16,64,...] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import click
import numpy as np
import torch
import zmq

from connectors.kv.base import KVConnectorConfig, KVLayout, KVSide
from connectors.kv.peer import KVPeerConnector
from core.types import KVHandle, KVRole

_TIMEOUT_S = 120.0
_WINDOW = 4


def layout_of(block_bytes: int) -> KVLayout:
    return KVLayout(1, "benchmark", "uint8", 1, 1, 1, block_bytes // 2)


class Side:
    """One engine's connector, both halves, over a cache of its own."""

    def __init__(self, role: KVRole, block_bytes: int, num_blocks: int, same_host: str) -> None:
        self._rung = threading.Event()
        config = KVConnectorConfig(role, layout_of(block_bytes), "0", {"same_host": same_host}, self._rung.set)
        self.scheduler = KVPeerConnector(config, KVSide.SCHEDULER)
        self.worker = KVPeerConnector(config, KVSide.WORKER)
        memory = self.worker.allocate_kv_cache(num_blocks * block_bytes, torch.device("cpu"))
        if memory is None:
            memory = torch.empty(num_blocks * block_bytes, dtype=torch.uint8)
        self.blocks = memory.view(num_blocks, block_bytes)
        self.blocks.fill_(1)
        self.worker.register_kv_caches(self.blocks)
        self.scheduler.set_handshake(self.worker.handshake())

    def step(self) -> None:
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta())
        self.worker.start_load_kv()
        self.worker.clear_connector_metadata()

    def pull(self, request_id: str, handle: KVHandle, block_ids: list[int]) -> str:
        """Returns the road that the blocks took."""
        self.scheduler.update_state_after_alloc(request_id, handle, block_ids)
        self.step()
        while True:
            if not self._rung.wait(_TIMEOUT_S):
                raise TimeoutError("the pull did not end")
            self._rung.clear()
            output = self.worker.get_finished()
            if output.failed_recving or output.num_retries:
                raise RuntimeError(f"a pull that should have gone well: {output}")
            if output.finished_recving:
                return output.roads[request_id]

    def settle(self) -> None:
        """Wait until a producer has done beforehand what it can do for its leases."""
        server = self.worker._server
        while server is not None and server.is_behind:
            time.sleep(1e-3)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def serve(pipe: Pipe, block_bytes: int, num_blocks: int) -> None:
    """The producer's process: leases blocks when told to; and a bare socket that sends what it is asked for."""
    torch.set_num_threads(1)
    side = Side(KVRole.PRODUCER, block_bytes, num_blocks, "auto")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bare:
        bare.linger = 0
        pipe.send(bare.bind_to_random_port("tcp://127.0.0.1"))
        sender = threading.Thread(target=_send, args=(bare, side.blocks.view(-1).numpy()), daemon=True)
        sender.start()
        while (order := pipe.recv()) is not None:
            request_id, block_ids = order
            handle = side.scheduler.request_finished(request_id, block_ids, len(block_ids))
            side.step()
            pipe.send(handle)
        sender.join()
    side.close()


def _send(bare: zmq.Socket[bytes], data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    while True:
        peer, order = bare.recv_multipart()
        if not order:
            return
        first, size = map(int, order.split())
        bare.send_multipart([peer, b"header", memoryview(data[first : first + size].data)], copy=False)


def receive_bare(bare: zmq.Socket[bytes], num_bytes: int) -> None:
    size = 2 << 20  # what ZeroMQ does best with
    pieces = [(first, min(size, num_bytes - first)) for first in range(0, num_bytes, size)]
    for asked in pieces[:_WINDOW]:
        bare.send(b"%d %d" % asked)
    for n in range(len(pieces)):
        bare.recv_multipart(copy=False)
        if n + _WINDOW < len(pieces):
            bare.send(b"%d %d" % pieces[n + _WINDOW])


def measure(block_bytes: int, num_blocks: int, rounds: int) -> dict[str, float]:
    """GB/s of each way."""
    num_bytes = block_bytes * num_blocks
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, block_bytes, num_blocks))
    process.start()
    port = ours.recv()
    network = Side(KVRole.CONSUMER, block_bytes, num_blocks, "never")
    mapped = Side(KVRole.CONSUMER, block_bytes, num_blocks, "always")
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)
    names = (f"{way} {n}" for n in range(10**6) for way in ("network", "shared memory"))
    shuffled = random.Random(0)
    best: dict[str, float] = {}

    def note(way: str, seconds: float) -> None:
        best[way] = max(best.get(way, 0.0), num_bytes / seconds / 1e9)

    def pull(side: Side, names: Iterator[str]) -> None:
        name = next(names)
        theirs_ids, ours_ids = list(range(num_blocks)), list(range(num_blocks))
        shuffled.shuffle(theirs_ids)
        shuffled.shuffle(ours_ids)
        ours.send((name, theirs_ids))
        handle = ours.recv()
        begin_s = time.perf_counter()
        road = side.pull(name, handle, ours_ids)
        note(road, time.perf_counter() - begin_s)
        if not name.startswith(road):
            raise RuntimeError(f"{name} came over {road}")

    with zmq.Context() as context, context.socket(zmq.DEALER) as bare:
        bare.linger = 0
        bare.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(rounds):
            begin_s = time.perf_counter()
            receive_bare(bare, num_bytes)
            note("bare ZeroMQ", time.perf_counter() - begin_s)
            pull(network, names)
            begin_s = time.perf_counter()
            target[:] = source
            note("memcpy", time.perf_counter() - begin_s)
            pull(mapped, names)
        bare.send(b"")
        ours.send(None)
        process.join(_TIMEOUT_S)
    for side in (network, mapped):
        side.close()
    return best


@click.command()
@click.option("--mib", default=128, show_default=True, help="MiB a pull.")
@click.option("--block-kib", default="16,64,256,2048", show_default=True, help="Sizes of a block.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(mib: int, block_kib: str, rounds: int, json_file: Path | None) -> None:
    torch.set_num_threads(1)
    results = []
    click.echo("block      blocks  ZeroMQ  network         memcpy  shared memory   GB/s")
    for kib in map(int, block_kib.split(",")):
        num_blocks = max(1, (mib << 10) // kib)
        best = measure(kib << 10, num_blocks, rounds)
        results.append({"block_bytes": kib << 10, "num_blocks": num_blocks, "gb_per_s": best})
        network, mapped = best["network"], best["shared memory"]
        click.echo(
            f"{kib:5d} KiB  {num_blocks:6d}  {best['bare ZeroMQ']:6.2f}"
            f"  {network:6.2f} ({network / best['bare ZeroMQ']:4.0%})"
            f"  {best['memcpy']:6.2f}  {mapped:6.2f} ({mapped / best['memcpy']:4.0%})"
        )
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
