"""A stub stage as a program with a service's options and ready line; `--where` says which stage it is."""

from __future__ import annotations

import argparse
import asyncio

from cli.cluster import STAGES, LocalCluster
from tests.router.stubs import StubDecode, StubEncoder, StubPrefill


class StubCluster(LocalCluster):
    """A local cluster of stub stages and the real router."""

    modules = dict.fromkeys(STAGES, "tests.cli.stub_stage")


async def serve(stage: str, port: int) -> None:
    stub = {"encoder": StubEncoder, "prefill": StubPrefill, "decode": lambda: StubDecode([])}[stage]()
    await stub.start(port)
    print(f"ready {stage} grpc={stub.address} metrics=127.0.0.1:1", flush=True)
    await stub.server.wait_for_signal()
    await stub.server.drain(5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("--port", type=int)
    parser.add_argument("--where")
    options, _ = parser.parse_known_args()
    asyncio.run(serve(options.where.partition("-")[0], options.port))
