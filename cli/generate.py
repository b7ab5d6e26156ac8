"""`triptych generate`: one request to a router, streamed to the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import grpc
import msgspec

from cli.client import describe, image_request
from cli.timeline import render
from core.convert import finish_reason_from_proto, spans_from_proto, usage_from_proto
from core.errors import TriptychError
from core.server import CHANNEL_OPTIONS
from protos import common_pb2, router_pb2, router_pb2_grpc


@click.command()
@click.option("--router", required=True, metavar="HOST:PORT", envvar="TRIPTYCH_ROUTER", help="The router's gRPC.")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An image file; several stand in the order given, before the text.",
)
@click.option("--prompt", required=True, help="The question.")
@click.option("--max-tokens", type=click.IntRange(1), help="[default: what the model leaves]")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=click.IntRange(0))
@click.option("--ignore-eos", is_flag=True, help="Go on to --max-tokens, whatever the model says.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True, metavar="SECONDS")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming text.")
def generate(
    router: str,
    images: tuple[Path, ...],
    prompt: str,
    max_tokens: int | None,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    ignore_eos: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Ask a router one question and stream the answer."""
    sampling = common_pb2.SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    request = image_request(prompt, [path.read_bytes() for path in images], sampling)
    token_ids: list[int] = []
    texts: list[str] = []
    finished: router_pb2.GenerateFinished | None = None
    try:
        with grpc.insecure_channel(router, options=CHANNEL_OPTIONS) as channel:
            for response in router_pb2_grpc.RouterStub(channel).Generate(request, timeout=timeout):
                token_ids.extend(response.token_ids)
                texts.append(response.text)
                if not as_json:
                    print(response.text, end="", flush=True)
                if response.HasField("finished"):
                    finished = response.finished
    except grpc.RpcError as error:
        if texts and not as_json:
            print()
        raise click.ClickException(describe(error)) from error
    if finished is None:
        raise click.ClickException("the stream ended without an end")
    if as_json:
        print(_as_json(token_ids, "".join(texts), finished))
        return
    print()
    if sys.stderr.isatty():
        utf8 = (sys.stderr.encoding or "").lower().startswith("utf")
        print("\n" + render(spans_from_proto(finished.timeline), block="█" if utf8 else "#"), file=sys.stderr)


def _as_json(token_ids: list[int], text: str, finished: router_pb2.GenerateFinished) -> str:
    try:
        reason = finish_reason_from_proto(finished.finish_reason)
    except TriptychError as error:
        raise click.ClickException(str(error)) from error
    result = {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": reason,
        # Structs that are arrays on the wire between processes; people get names.
        "usage": msgspec.structs.asdict(usage_from_proto(finished.usage)),
        "timeline": [msgspec.structs.asdict(span) for span in spans_from_proto(finished.timeline)],
    }
    return msgspec.json.encode(result).decode()
