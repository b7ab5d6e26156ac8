"""The router beside a bare `grpc.aio` pass-through of the same messages: one picture, 32 streamed tokens, stub workers.

    python -m benchmarks.router [--rounds N] [--requests N] [--memory N] [--attach HOST:PORT,PID] [--profile FILE]

Stubs, pass-through and router are processes on loopback; both proxies are measured in turns, in rounds, in the same
run. Prints requests per second of a whole core of the proxy (its own processor time is what counts), what each adds to
the time to first token of the stages themselves, and with --memory the router's memory over so many requests.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import psutil
from PIL import Image

from benchmarks.router.load import Client, Cost

_ROOT = Path(__file__).resolve().parent.parent.parent
_TOKENS = 32
_FEW_TOKENS = 2  # of the memory run, where only the number of requests counts
_CONCURRENCY = 8
_WARM_UP = 200

#: HOST:PORT and the process that serves there.
Running = tuple[str, psutil.Process]


@contextmanager
def program(*args: str) -> Iterator[Running]:
    """A Python program; its address and process once it serves. Ended at the end."""
    process = subprocess.Popen(
        [sys.executable, *args], stdout=subprocess.PIPE, text=True, cwd=_ROOT, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready "):
            raise click.ClickException(f"{' '.join(args)} did not start")
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        yield words["grpc"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def picture() -> bytes:
    """Some 60 KiB."""
    out = io.BytesIO()
    Image.frombytes("RGB", (144, 144), random.Random(0).randbytes(144 * 144 * 3)).save(out, "PNG")
    return out.getvalue()


class Proxy:
    """One of the two, and its figures."""

    def __init__(self, name: str, address: str, process: psutil.Process, file: bytes) -> None:
        self.name = name
        self.process = process
        self.client = Client(address, file, _TOKENS)
        self.costs: list[Cost] = []
        self.ttft_s: list[float] = []

    @property
    def per_core(self) -> float:
        return statistics.median(cost.per_core for cost in self.costs)


async def measure(proxies: list[Proxy], stages: Client, rounds: int, num_requests: int) -> float:
    """Fill the proxies' figures; returns the stages' own seconds to the first token."""
    direct_s: list[float] = []
    for proxy in proxies:
        await proxy.client.run(_WARM_UP, _CONCURRENCY, proxy.process)
    for _ in range(rounds):
        for proxy in proxies:
            proxy.costs.append(await proxy.client.run(num_requests, _CONCURRENCY, proxy.process))
        for _ in range(60):
            direct_s.append(await stages.ask_stages())
            for proxy in proxies:
                proxy.ttft_s.append(await proxy.client.ask())
    return statistics.median(direct_s)


async def watch_memory(router: Running, num_requests: int) -> None:
    """Print the process's resident size after each tenth of the requests."""
    client = Client(router[0], picture(), _FEW_TOKENS)
    sizes = []
    for _ in range(10):
        await client.run(num_requests // 10, 2 * _CONCURRENCY, router[1])
        sizes.append(router[1].memory_info().rss / 2**20)
    await client.close()
    print(f"router's memory over {num_requests} requests, MiB:", *(f"{size:.1f}" for size in sizes), flush=True)


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--requests", "num_requests", default=400, show_default=True, help="Of each proxy in a round.")
@click.option("--memory", default=0, show_default=True, help="Requests over which the router's memory is watched.")
@click.option("--profile", default="", help="Write the router's cProfile statistics there; the figures are worthless.")
@click.option("--attach", default="", help="HOST:PORT,PID of a router over stubs, whose memory is watched.")
def main(rounds: int, num_requests: int, memory: int, profile: str, attach: str) -> None:
    """Run it and print a table."""
    if attach:
        address, pid = attach.split(",")
        asyncio.run(watch_memory((address, psutil.Process(int(pid))), memory))
        return
    profiler = ("-m", "cProfile", "-o", profile) if profile else ()
    with ExitStack() as stack:
        stub, _ = stack.enter_context(program("-m", "benchmarks.router.stages"))
        lists = [f"--{stage}={stub}" for stage in ("encoder", "prefill", "decode")]
        bare = stack.enter_context(program("-m", "benchmarks.router.passthrough", stub))
        ours = stack.enter_context(
            program(*profiler, "-m", "router", "serve", "--port=0", "--http-port=0", "--log-level=WARNING", *lists)
        )
        asyncio.run(_run(stub, bare, ours, rounds, num_requests, memory))


async def _run(stub: str, bare: Running, ours: Running, rounds: int, requests: int, memory: int) -> None:
    file = picture()
    proxies = [Proxy("pass-through", *bare, file), Proxy("router", *ours, file)]
    stages = Client(stub, file, _TOKENS)
    if rounds:
        direct_s = await measure(proxies, stages, rounds, requests)
        print(f"stages alone: {direct_s * 1e3:.2f} ms to the first token")
        for proxy in proxies:
            added_ms = (statistics.median(proxy.ttft_s) - direct_s) * 1e3
            print(f"{proxy.name:12} {proxy.per_core:6.0f} requests/s per core, adds {added_ms:.2f} ms")
        ratios = [b.per_core / a.per_core for a, b in zip(proxies[0].costs, proxies[1].costs, strict=True)]
        print(f"ratio {statistics.median(ratios):.3f} (rounds {' '.join(f'{ratio:.3f}' for ratio in ratios)})")
    if memory:
        await watch_memory(ours, memory)
    for proxy in proxies:
        await proxy.client.close()
    await stages.close()


if __name__ == "__main__":
    main()
