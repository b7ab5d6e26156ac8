"""`triptych bench` as a command: options in, table or JSON out."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

import click
import msgspec
from tqdm import tqdm

from cli.bench.grpc_target import GrpcTarget
from cli.bench.http_target import HttpTarget
from cli.bench.load import BenchRequest, LoadSpec, Record, Target, TargetError, make_requests, run_load
from cli.bench.report import Report, summarize, to_table

# All images of a load are in memory before it starts. A JPEG of noise takes about a byte a pixel.
_MAX_IMAGE_BYTES = 8 * 1024**3


@click.command()
@click.option("--target", required=True, metavar="URL", help="http://HOST:PORT/v1, or grpc://HOST:PORT of a router.")
@click.option("--model", help="The model to name in HTTP requests [default: the first that the server lists].")
@click.option("--images", type=click.IntRange(0), default=1, show_default=True, help="Images in each request.")
@click.option("--side", type=click.IntRange(1, 8192), default=448, show_default=True, help="Pixels.")
@click.option("--input-len", type=click.IntRange(1), default=32, show_default=True, help="Words of prompt text.")
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each answer.")
@click.option(
    "--request-rate",
    type=click.FloatRange(0, min_open=True),
    default=math.inf,
    show_default=True,
    help="Requests a second, as a Poisson process; inf: all at once.",
)
@click.option("--num-requests", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--repeat-ratio",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of images that were sent before.",
)
@click.option("--slo-ttft-ms", type=click.FloatRange(0, min_open=True))
@click.option("--slo-tpot-ms", type=click.FloatRange(0, min_open=True))
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Of each request.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def bench(
    *, target: str, model: str | None, images: int, side: int, input_len: int, output_len: int, request_rate: float,
    num_requests: int, repeat_ratio: float, slo_ttft_ms: float | None, slo_tpot_ms: float | None, timeout: float,
    seed: int, as_json: bool,
) -> int:  # fmt: skip
    """Put open-loop load on a server and report latencies, throughput, errors and goodput."""
    if num_requests * images * side * side * (1 - repeat_ratio) > _MAX_IMAGE_BYTES:
        raise click.ClickException("--num-requests, --images and --side make more than 8 GiB of images")
    connect = _target(target, model)
    spec = LoadSpec(
        num_requests=num_requests,
        request_rate=request_rate,
        images=images,
        side=side,
        input_len=input_len,
        output_len=output_len,
        repeat_ratio=repeat_ratio,
        seed=seed,
        timeout_s=timeout,
    )
    with tqdm(total=num_requests, desc="preparing", file=sys.stderr, leave=False) as bar:
        requests = make_requests(spec, bar.update)
    try:
        records, duration_s = asyncio.run(_run(connect, requests))
    except TargetError as error:
        raise click.ClickException(f"{error.kind}: {error}") from error
    report = summarize(target, records, duration_s, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms)
    _print(report, records, as_json)
    return 0 if report.completed else 1


def _target(url: str, model: str | None) -> Callable[[], Target]:
    parts = urlsplit(url)
    if parts.scheme == "grpc" and parts.netloc and parts.path in ("", "/"):
        return lambda: GrpcTarget(parts.netloc)
    if parts.scheme in ("http", "https") and parts.netloc:
        return lambda: HttpTarget(url, model)
    raise click.UsageError(f"--target={url!r} is neither http://HOST:PORT/v1 nor grpc://HOST:PORT")


async def _run(connect: Callable[[], Target], requests: list[BenchRequest]) -> tuple[list[Record], float]:
    target = connect()  # here, because both kinds belong to the running loop
    try:
        if isinstance(target, HttpTarget):
            await target.prepare()
        with tqdm(total=len(requests), desc="requests", file=sys.stderr) as bar:
            return await run_load(requests, target, lambda record: bar.update())
    finally:
        await target.close()


def _print(report: Report, records: list[Record], as_json: bool) -> None:
    # One example of each kind of error; the report has the numbers.
    shown: set[str] = set()
    for record in records:
        if record.error and record.error not in shown:
            shown.add(record.error)
            print(f"{record.error}: {record.error_details}", file=sys.stderr)
    print(msgspec.json.encode(report).decode() if as_json else to_table(report))
